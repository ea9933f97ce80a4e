"""Linear layers with bf16 weights on CPUs: our own matrix product in C++, over packed weights.

There are two cases:
- x in bf16, on CPUs with AVX-512 BF16. For the few rows of a decode step, oneDNN's start costs as
  much time as the product. On one core our product takes half of oneDNN's time with 1 to 8 rows,
  0.6 to 0.7 with 16, 0.9 with 64 and the same with 256.
- x in fp32, on every CPU, for weights whose values fit into bf16, as in most checkpoints. The
  weights stay bf16 in memory and are widened in registers, so that a step reads half of the bytes.
  On one core with AVX2 that takes 0.4 of oneDNN's time with 1 to 4 rows, 0.65 with 16, 0.9 with 64
  and the same with 256.

Weights are packed once, by torch, into panels of as many outputs as fit into two vector registers.
The product is in `kernels/cpu/linear.cpp`. Sums are in fp32.
"""

import torch

from stepscope.kernels.cpu.huge_pages import HugePages
from stepscope.kernels.cpu.library import LINEAR, default_library

LEVEL = "avx512_bf16"  # the library level that multiplies pairs of bf16


def is_usable(weight: torch.Tensor) -> bool:
    """Whether to use our product for `weight`: not for bf16 with AMX, where oneDNN is faster."""
    library = default_library()
    if library is None or not weight.is_cpu:
        return False
    if weight.dtype is torch.float32:
        return not bool((weight.contiguous().view(torch.int16)[:, ::2] != 0).any())
    return (
        weight.dtype is torch.bfloat16
        and library.level == LEVEL
        and weight.shape[1] % 2 == 0
        and not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    )


class PackedLinear:
    """Computes `x @ weight.T + bias`, `[N, in_features]` to `[N, out_features]`.

    `is_usable(weight)` must be true. x and the result have the weight's dtype.

    Args:
        memory: where the packed weights go; None: ordinary memory.
        is_gated: compute `silu(x @ gate.T) * (x @ up.T)`; `weight` has the rows of gate, then those
            of up, and so has `bias`. A panel has a vector of gate's outputs and the matching vector
            of up's, so that SwiGLU (Shazeer, 2020) is computed before anything is stored.

    Attributes:
        num_bytes: size of the weights in bf16, without the zeros that fill the last panel.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: HugePages | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        num_rows, self._size = weight.shape
        self.out_features = num_rows // 2 if is_gated else num_rows
        self.num_bytes = 2 * weight.numel()
        # For each output of the panels, the row of `weight` that computes it; a row past the end
        # stands for zeros.
        if is_gated:
            lanes = _width() // 2
            gate = torch.arange(_round_up(self.out_features, lanes))
            gate[self.out_features :] = num_rows  # not the first rows of up
            panels = [gate.view(-1, lanes), (gate + self.out_features).view(-1, lanes)]
            rows = torch.stack(panels, dim=1).flatten()
        else:
            rows = torch.arange(_round_up(num_rows, _width()))
        zeros = weight.new_zeros(1, self._size)
        rows = rows.clamp(max=num_rows)
        padded = torch.cat([weight, zeros])[rows]
        self._dtype = weight.dtype
        if self._dtype is torch.bfloat16:
            pairs = padded.view(-1, _width(), self._size // 2, 2)
            ordered = pairs.transpose(1, 2)  # [panels, pairs, width, 2]
        else:
            halves = padded.bfloat16().view(-1, 2, _width() // 2, self._size)
            ordered = halves.permute(0, 3, 2, 1)  # [panels, inputs, width / 2, 2]
        self._packed = ordered.contiguous() if memory is None else memory.copy(ordered)
        self._bias = None if bias is None else torch.cat([bias.float(), torch.zeros(1)])[rows]
        self._is_gated = int(is_gated)
        library = default_library()
        assert library is not None
        self._linear = library.linear
        self._addresses = (
            self._packed.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not (x.dtype is self._dtype and x.is_contiguous()):
            x = x.to(self._dtype).contiguous()
        output = x.new_empty(len(x), self.out_features)
        packed, bias = self._addresses
        self._linear(LINEAR.pack(
            x.data_ptr(), packed, bias, output.data_ptr(), len(x), self.out_features, self._size,
            len(self._packed), self._is_gated, torch.get_num_threads(),
            int(self._dtype is torch.bfloat16),
        ))  # fmt: skip
        return output


def _width() -> int:
    """Number of outputs in a panel: as many as two vector registers hold."""
    library = default_library()
    assert library is not None
    return library.linear_width()


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to
