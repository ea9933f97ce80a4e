"""`Linear` and `GatedLinear`: the one seam through which the lean decoder multiplies by weights.

On a CPU weights are packed once, into the layout that is multiplied from fastest: our own for bf16
and for fp32 whose values are those of bf16 (`kernels/cpu/linear.py`), else that of oneDNN, which
takes 0.5 to 0.8 of the time of `F.linear` with 1 to 16 rows and the same from 256 rows on (one core
with AVX-512). oneDNN's operators that pack are private ones of torch, so `F.linear` stays as a
fallback; `layout` says which is used.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.cpu.huge_pages import HugePages
from stepscope.kernels.cpu.linear import PackedLinear, is_usable
from stepscope.kernels.dispatch.fused import silu_mul

# Rows that oneDNN's layout is chosen for: one for 1 row is slow in fp32 with more; one for many is
# good for few as well.
PACKED_FOR_ROWS = 16


class _Product(NamedTuple):
    layout: str
    num_bytes: int  # of its weights
    multiply: Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """`x @ weight.T + bias` for x [rows, in_features], weight [out_features, in_features].

    Takes the weight over: the caller should not keep it, or it is in memory twice. Where it is
    copied to can be said by `memory`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugePages | None = None,
    ) -> None:
        self.layout, self.num_bytes, self._multiply = _product(weight, bias, memory)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


class GatedLinear:
    """`silu(x @ gate.T) * (x @ up.T)`, biases added; `weight` is gate and, below it, up."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugePages | None = None,
    ) -> None:
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        if is_usable(weight):
            linear = PackedLinear.gated(weight, bias, memory)
            self.layout, self.num_bytes, self._multiply = "packed", linear.num_bytes, linear
        else:
            self.layout, self.num_bytes, product = _product(weight, bias, memory)
            self._multiply = lambda x: silu_mul(product(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


def _product(weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages | None) -> _Product:
    if is_usable(weight):
        linear = PackedLinear(weight, bias, memory)
        return _Product("packed", linear.num_bytes, linear)
    num_bytes = weight.numel() * weight.itemsize
    if _onednn_packs(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        onednn = torch.ops.mkldnn._linear_pointwise.default
        multiply = partial(onednn, W=packed, B=bias, attr="none", scalars=[], algorithm="")
        return _Product("oneDNN-packed", num_bytes, multiply)
    return _Product("plain", num_bytes, partial(F.linear, weight=weight, bias=bias))


def _onednn_packs(weight: torch.Tensor) -> bool:
    """Whether this build of torch, on this processor, multiplies by packed weights of this kind."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not (
        hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")
    ):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
