"""Linear layers with bf16 weights on CPUs: our own matrix product in C++, over packed weights.

There are three cases:
- x in bf16, on CPUs with AVX-512 BF16. For the few rows of a decode step, oneDNN's start costs as
  much time as the product. On one core our product takes half of oneDNN's time with 1 to 8 rows,
  0.6 to 0.7 with 16, 0.9 with 64 and the same with 256.
- x in bf16, on CPUs with AMX, by tile instructions if x has a multiple of 32 columns
  (`TILE_INPUTS`). Whether that is faster than oneDNN is tried when a model is loaded
  (`kernels/dispatch/linear.py`).
- x in fp32, on every CPU, for weights whose values fit into bf16, as in most checkpoints. The
  weights stay bf16 in memory and are widened in registers, so that a step reads half of the bytes.
  On one core with AVX2 that takes 0.4 of oneDNN's time with 1 to 4 rows, 0.65 with 16, 0.9 with 64
  and the same with 256.

Weights are packed once, by torch, into panels of as many outputs as fit into two vector registers.
The product is in `kernels/cpu/linear.cpp`. Sums are in fp32.

Packed weights go into huge pages of memory, as every step reads all of them. With pages of 4 KiB, a
core spends much of its time looking up pages, and its prefetcher stops at the end of each page. On
one core of an AMD EPYC (Linux 6), the same matrix product reads 30 to 35 GB/s of weights from huge
pages and 18 to 22 GB/s from small ones.
"""

import mmap

import torch

from stepscope.kernels.cpu.library import LINEAR, default_library

BF16_LEVELS = ("avx512_bf16", "amx_bf16")  # the library levels with products of bf16
TILE_INPUTS = 32  # values in a row of a tile (kernels/cpu/tiles.h)
PAGE_BYTES = 2 << 20  # on x86-64, and on aarch64 with a granule of 4 KiB
ALIGNMENT = 64


def is_usable(weight: torch.Tensor) -> bool:
    """Whether our product can multiply by `weight` exactly, on this CPU."""
    library = default_library()
    if library is None or not weight.is_cpu:
        return False
    if weight.dtype is torch.float32:
        return not bool((weight.contiguous().view(torch.int16)[:, ::2] != 0).any())
    return (
        weight.dtype is torch.bfloat16 and library.level in BF16_LEVELS and weight.shape[1] % 2 == 0
    )


class HugePages:
    """A reservation in huge pages, filled with tensors in order; torch's memory for the rest."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: torch.Tensor | None = None
        self._at = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor into the reservation, contiguously; return the copy."""
        if self._memory is None:
            self._memory = _reserve(self._num_bytes)
        num_bytes = tensor.numel() * tensor.element_size()
        if self._at + num_bytes > len(self._memory):
            return tensor.contiguous()
        piece = self._memory[self._at : self._at + num_bytes].view(tensor.dtype).view(tensor.shape)
        self._at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece.copy_(tensor)


def _reserve(num_bytes: int) -> torch.Tensor:
    """Reserve memory that begins at a huge page; returns no bytes if there are no huge pages."""
    nothing = torch.empty(0, dtype=torch.uint8)
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes < PAGE_BYTES:
        return nothing
    num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    # One page more, because huge pages begin at multiples of their size.
    mapping = mmap.mmap(-1, num_bytes + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel has no huge pages
        return nothing
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + num_bytes]


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
        library = default_library()
        assert library is not None
        width = library.linear_width()
        num_rows, self._size = weight.shape
        self.out_features = num_rows // 2 if is_gated else num_rows
        self.num_bytes = 2 * weight.numel()
        # For each output of the panels, the row of `weight` that computes it; a row past the end
        # stands for zeros.
        lanes = width // 2 if is_gated else width
        rows = torch.arange(-(-self.out_features // lanes) * lanes)
        if is_gated:
            rows[self.out_features :] = num_rows  # not the first rows of up
            panels = [rows.view(-1, lanes), (rows + self.out_features).view(-1, lanes)]
            rows = torch.stack(panels, dim=1).flatten()
        zeros = weight.new_zeros(1, self._size)
        rows = rows.clamp(max=num_rows)
        padded = torch.cat([weight, zeros])[rows]
        self._dtype = weight.dtype
        if self._dtype is torch.bfloat16:
            pairs = padded.view(-1, width, self._size // 2, 2)
            ordered = pairs.transpose(1, 2)  # [panels, pairs, width, 2]
        else:
            halves = padded.bfloat16().view(-1, 2, width // 2, self._size)
            ordered = halves.permute(0, 3, 2, 1)  # [panels, inputs, width / 2, 2]
        self._packed = ordered.contiguous() if memory is None else memory.copy(ordered)
        self._bias = None if bias is None else torch.cat([bias.float(), torch.zeros(1)])[rows]
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._is_gated = int(is_gated)
        self._linear = library.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not (x.dtype is self._dtype and x.is_contiguous()):
            x = x.to(self._dtype).contiguous()
        output = x.new_empty(len(x), self.out_features)
        self._linear(LINEAR.pack(
            x.data_ptr(), self._packed.data_ptr(), self._bias_address, output.data_ptr(), len(x),
            self.out_features, self._size, len(self._packed), self._is_gated,
            torch.get_num_threads(), int(self._dtype is torch.bfloat16),
        ))  # fmt: skip
        return output
