"""The operations between the matrix products of a layer in Triton, each in one kernel.

`dispatch/fused.py` describes what they compute, and calls them with contiguous tensors.
"""

import torch

import triton
import triton.language as tl
from stepscope.kernels.paged_attention import LayerCache, QKVHeads

# Elements of a row that one warp normalises.
NORM_WARP_ELEMENTS = 512
# Elements of half heads for one warp, 16 bytes of bf16 per thread. Few, so that even a decode of
# one request has many programs.
HALF_WARP_ELEMENTS = 256
SILU_BLOCK = 1024  # 16 bytes of bf16 for each of 128 threads


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
            num_warps=min(16, max(1, block // NORM_WARP_ELEMENTS)), enable_fp_fusion=True,
        )  # fmt: skip
    return output, x if residual is None else residual


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _norm_rope_store(  # type: ignore[no-untyped-def]
    qkv: tl.tensor,
    rope: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each program computes up to `HEADS` heads of one token: only queries, or keys, or values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    Q_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    PROGRAMS: tl.constexpr = Q_PROGRAMS + 2 * KV_PROGRAMS
    part = tl.program_id(0) % PROGRAMS
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    dims = tl.arange(0, HALF_PAD)[None, :]
    heads = tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots + token)
    row = qkv + token * WIDTH
    if part < Q_PROGRAMS:
        heads += part * HEADS
        mask = (heads < NUM_HEADS) & (dims < HALF)
        _store_rotated(
            row + heads * HEAD_DIM,
            query + (token * NUM_HEADS + heads) * HEAD_DIM + dims, mask, dims,
            rope + tl.load(positions + token) * HEAD_DIM, q_norm, eps, HEAD_DIM, HAS_Q_NORM,
        )  # fmt: skip
    elif part < Q_PROGRAMS + KV_PROGRAMS:
        heads += (part - Q_PROGRAMS) * HEADS
        mask = (heads < NUM_KV_HEADS) & (dims < HALF)
        _store_rotated(
            row + (NUM_HEADS + heads) * HEAD_DIM,
            key_cache + (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims, mask, dims,
            rope + tl.load(positions + token) * HEAD_DIM, k_norm, eps, HEAD_DIM, HAS_K_NORM,
        )  # fmt: skip
    else:
        heads += (part - Q_PROGRAMS - KV_PROGRAMS) * HEADS
        mask = (heads < NUM_KV_HEADS) & (dims < HALF)
        source = row + (NUM_HEADS + NUM_KV_HEADS + heads) * HEAD_DIM + dims
        target = value_cache + (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims
        for half in tl.static_range(2):
            value = tl.load(source + half * HALF, mask=mask, other=0.0)
            tl.store(target + half * HALF, value.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def _store_rotated(  # type: ignore[no-untyped-def]
    source: tl.tensor,  # address of each head
    target: tl.tensor,  # address of each element of its first half
    mask: tl.tensor,
    dims: tl.tensor,
    rope: tl.tensor,  # address of this position's cosines, then sines
    norm: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store both halves of each head, normalised if `HAS_NORM`, and rotated."""
    HALF: tl.constexpr = HEAD_DIM // 2
    first = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + dims + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        is_dim = dims < HALF
        first = first * scale * tl.load(norm + dims, mask=is_dim, other=0.0).to(tl.float32)
        second = second * scale * tl.load(norm + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    cos = tl.load(rope + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(rope + HALF + dims, mask=dims < HALF, other=0.0)
    dtype = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def norm_rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LayerCache,
    heads: QKVHeads,
) -> torch.Tensor:
    """Launch the GPU version of `fused.norm_rope_store`: contiguous tensors, nothing is checked."""
    num_heads, num_kv_heads, q_norm, k_norm, eps = heads
    head_dim = rope.shape[1]
    num_tokens = len(qkv)
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return query
    half_pad = triton.next_power_of_2(head_dim // 2)
    at_once = max(1, HALF_WARP_ELEMENTS // half_pad)
    num_programs = triton.cdiv(num_heads, at_once) + 2 * triton.cdiv(num_kv_heads, at_once)
    _norm_rope_store[(num_programs * num_tokens,)](
        qkv, rope, positions, slot_mapping, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, query, cache.keys, cache.values, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF_PAD=half_pad,
        HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None, HEADS=at_once,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return query


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
        _silu_mul[(triton.cdiv(size, SILU_BLOCK) * num_rows,)](
            gate_up, output, SIZE=size, BLOCK=SILU_BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return output
