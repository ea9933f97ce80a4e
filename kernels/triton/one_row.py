"""The product of one row with a weight in Triton: a decode of one request.

It is bound by reading the weight, so tensor cores gain nothing. A program owns a few outputs whole:
it reads their rows of the weight in loads of 16 bytes a thread, and adds up in fp32. For a gated
product, it reads the row of the gate and that of the up projection, and applies SiLU itself.
"""

from typing import NamedTuple

import torch

import triton
import triton.language as tl

# Elements of half precision in 16 bytes, for the threads of a warp.
WARP_ELEMENTS = 8 * 32


class RowTile(NamedTuple):
    rows: int  # of the weight
    depth: int  # loads of 16 bytes of a thread in each row before it adds up
    num_warps: int
    num_stages: int  # more than 1: loads of the next steps are in flight, into shared memory


# Those that `kernels/dispatch/linear.py` tries: with the programs that fit on a multiprocessor of
# an H200, each has 64 KB or more in flight there, more than its memory needs.
TILES = (RowTile(1, 4, 4, 1), RowTile(4, 1, 4, 4), RowTile(1, 8, 1, 1))


@triton.jit
def _one_row(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_outputs: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    dtype = output.dtype.element_ty
    # Beyond the last row the last one again: it computes the same value.
    rows = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), num_outputs - 1)
    up_rows = rows.to(tl.int64) + num_outputs
    steps = tl.arange(0, DEPTH)[None, :, None] * WIDTH
    lanes = steps + tl.arange(0, WIDTH)[None, None, :]
    first = weight + rows.to(tl.int64)[:, None, None] * size + lanes
    up_first = weight + up_rows[:, None, None] * size + lanes
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    up_total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, size, DEPTH * WIDTH, num_stages=NUM_STAGES):
        if EVEN:
            row = tl.load(first + start, eviction_policy="evict_first")
            if GATED:
                up_row = tl.load(up_first + start, eviction_policy="evict_first")
            values = tl.load(x + start + lanes)
        else:
            mask = start + lanes < size
            row = tl.load(first + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_row = tl.load(
                    up_first + start, mask=mask, other=0.0, eviction_policy="evict_first"
                )
            values = tl.load(x + start + lanes, mask=mask, other=0.0)
        wide = values.to(tl.float32)
        total += tl.sum(row.to(tl.float32) * wide, 1)
        if GATED:
            up_total += tl.sum(up_row.to(tl.float32) * wide, 1)
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows).to(tl.float32)
    if GATED:
        up = tl.sum(up_total, 1)
        if HAS_BIAS:
            up += tl.load(bias + up_rows).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)  # rounded as between two kernels
        result = gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)
    tl.store(output + rows, result.to(dtype))


def one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: RowTile,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias`, or with `is_gated` `silu_mul` of that.

    Args:
        x: `[1, K]`, contiguous, like `weight` `[N, K]` and `bias` `[N]`; all of one dtype, in half
            precision.

    Returns: `[1, N]`, or `[1, N / 2]` if gated.
    """
    num_rows, size = weight.shape
    num_outputs = num_rows // 2 if is_gated else num_rows
    rows = max(1, tile.rows // 2) if is_gated else tile.rows
    output = x.new_empty(1, num_outputs)
    width = WARP_ELEMENTS * tile.num_warps
    _one_row[(triton.cdiv(num_outputs, rows),)](
        x, weight, output if bias is None else bias, output, num_outputs, size,
        ROWS=rows, DEPTH=tile.depth, WIDTH=width, NUM_STAGES=tile.num_stages,
        EVEN=size % (tile.depth * width) == 0, HAS_BIAS=bias is not None, GATED=is_gated,
        num_warps=tile.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return output
