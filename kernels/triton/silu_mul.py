"""SwiGLU's gate (Shazeer, 2020) in one Triton kernel: the GPU version of `fused.silu_mul`."""

import torch

import triton
import triton.language as tl

BLOCK = 1024  # 16 bytes of bf16 for each of 128 threads


@triton.jit
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up: tl.tensor, output: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program computes `BLOCK` columns of a row."""
    PROGRAMS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    columns = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    source = gate_up + row * (2 * SIZE) + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + row * SIZE + columns, product.to(output.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Launch the GPU version of `fused.silu_mul`: contiguous `[N, 2 I]` to `[N, I]`."""
    num_rows, width = gate_up.shape
    size = width // 2
    output = gate_up.new_empty(num_rows, size)
    if num_rows:
        _silu_mul[(triton.cdiv(size, BLOCK) * num_rows,)](
            gate_up, output, SIZE=size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return output
