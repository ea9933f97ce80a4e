"""The residual addition and RMSNorm (Zhang and Sennrich, 2019) in one Triton kernel."""

import torch

import triton
import triton.language as tl

# Elements of a row that one warp holds.
WARP_ELEMENTS = 512


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Each program computes one row."""
    dtype = output.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + columns
    wide = tl.load(x + row, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
        total = wide.to(dtype)
        tl.store(residual + row, total, mask=mask)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normalised = (wide * scale).to(dtype).to(tl.float32)
    tl.store(output + row, (normalised * weights).to(dtype), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the GPU version of `fused.add_rms_norm`; all tensors contiguous, of one dtype."""
    output = torch.empty_like(x)
    num_rows, size = x.shape
    if num_rows:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(num_rows,)](
            x, x if residual is None else residual, weight, output, eps,
            SIZE=size, BLOCK=block, HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(1, block // WARP_ELEMENTS)), enable_fp_fusion=True,
        )  # fmt: skip
    return output, x if residual is None else residual
