"""`Linear`: all products with weights in the lean decoder (`decoder.py`).

On a CPU weights are packed once, into the layout that multiplies fastest; `layout` says which one
is used:
- Ours, for bf16, and for fp32 weights that bf16 can hold exactly (`kernels/cpu/linear.py`).
- oneDNN's, otherwise. It takes 0.5 to 0.8 of the time of `F.linear` with 1 to 16 rows, and the same
  time from 256 rows on (one core with AVX-512).
- None, with `F.linear`, if torch lacks oneDNN's packing operators, which are private.

On a GPU weights stay as they are. One row is multiplied by whichever is faster, `F.linear` or our
own kernel (`kernels/dispatch/one_row.py`), and several rows by `F.linear`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.cpu.huge_pages import HugePages
from stepscope.kernels.cpu.linear import PackedLinear, is_usable
from stepscope.kernels.dispatch.fused import silu_mul
from stepscope.kernels.dispatch.one_row import one_row_product

# The number of rows for which oneDNN chooses its layout. A layout for 1 row is slow in fp32 with
# more rows; a layout for many rows is also good for few.
PACKED_FOR_ROWS = 16


class Linear:
    """Computes `x @ weight.T + bias` for x [rows, in_features], weight [out_features, in_features].

    Owns the weight: a caller that keeps it, too, may hold it in memory twice.

    Args:
        memory: where a weight in our own packed layout goes; None: ordinary memory.
        is_gated: compute `silu(x @ gate.T) * (x @ up.T)`, plus biases; `weight` has gate's rows,
            then up's.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugePages | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        if is_usable(weight):
            packed = PackedLinear(weight, bias, memory, is_gated=is_gated)
            self.layout, self.num_bytes, self._multiply = "packed", packed.num_bytes, packed
            return
        self.num_bytes = weight.numel() * weight.itemsize
        if _onednn_packs(weight):
            self.layout = "oneDNN-packed"
            ordered = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            onednn = torch.ops.mkldnn._linear_pointwise.default
            product = partial(onednn, W=ordered, B=bias, attr="none", scalars=[], algorithm="")
        else:
            self.layout = "plain"
            product = partial(F.linear, weight=weight, bias=bias)
        several = (lambda x: silu_mul(product(x))) if is_gated else product
        one = one_row_product(weight, bias, is_gated=is_gated)
        self._multiply = several if one is None else lambda x: (one if len(x) == 1 else several)(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


def _onednn_packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not all(map(partial(hasattr, operators), ("_reorder_linear_weight", "_linear_pointwise"))):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
