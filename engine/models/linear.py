"""`Linear`: the one seam through which the lean decoder multiplies by its weights.

On a CPU the weights are kept in the blocked layout that oneDNN multiplies fastest from. Otherwise
each call reorders them anew: with 1 to 16 rows packed weights take 0.5 to 0.8 of the time of
`F.linear`, from 256 rows on the same (one core with AVX-512). The operators that pack are private
ones of torch, so `F.linear` stays as a fallback, and `layout` says which of the two is used.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

# Rows that the layout is chosen for: one for 1 row is slow in fp32 with more; one for many is good
# for few as well.
PACKED_FOR_ROWS = 16


class Linear:
    """`x @ weight.T + bias` for x [rows, in_features], weight [out_features, in_features].

    Takes the weight over: the caller should not keep it, or it is in memory twice.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.layout = "rows"
        self._weight = weight
        self._bias = bias
        self._multiply: Callable[..., torch.Tensor] | None = None
        if _can_pack(weight):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
            self.layout = "oneDNN-packed"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._multiply is not None:
            return self._multiply(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    @property
    def num_parameters(self) -> int:
        return self.out_features * self.in_features + (
            0 if self._bias is None else self.out_features
        )


def _can_pack(weight: torch.Tensor) -> bool:
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
