"""The small operations between the matrix products of a decoder layer, each fused into one call.

They run in C++ for contiguous float32 and bfloat16 tensors on a CPU if the library was built, and
in Triton for contiguous tensors on a GPU. Otherwise they run in plain torch (`torch_*`, with which
the tests compare the other two). The result has the input's dtype.
"""

import functools
import logging
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.cpu.library import (
    ADD_RMS_NORM,
    CACHES,
    DTYPES,
    NORM_ROPE_STORE,
    SILU_MUL,
    CpuLibrary,
    default_library,
)
from stepscope.kernels.paged_attention import LayerCache, QKVHeads, store_kv

log = logging.getLogger("stepscope.kernels")

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """Return the Triton kernels, or None if Triton is missing or cannot compile."""
    try:
        from stepscope.kernels.triton import fused

        fused.silu_mul(torch.zeros(1, 64, device="cuda"))
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        log.warning("Triton's kernels cannot be used, plain torch takes their place: %s", error)
        return None
    return fused


def _kernels_for(x: torch.Tensor, *others: torch.Tensor | None) -> CpuLibrary | ModuleType | None:
    """Return the kernels for contiguous tensors of one dtype, where `x` is; None: plain torch."""
    dtype = x.dtype
    for each in (x, *others):
        if each is not None and not (each.dtype is dtype and each.is_contiguous()):
            return None
    if x.is_cuda:
        return _triton_kernels()
    return default_library() if x.is_cpu and dtype in _IS_BF16 else None


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream and normalise the sum: (normalised, residual), each `[N, D]`.

    `residual` is changed in place and rounded to its dtype. If it is None (the first layer), `x`
    itself becomes the residual. RMSNorm (Zhang and Sennrich, 2019) as in Llama and Qwen: statistics
    in fp32, the quotient rounded to the dtype of `x`, then multiplied by `weight` in that dtype.
    """
    kernels = _kernels_for(x, residual, weight)
    if kernels is None:
        return torch_add_rms_norm(x, residual, weight, eps)
    if isinstance(kernels, ModuleType):
        return kernels.add_rms_norm(x, residual, weight, eps)
    output = torch.empty_like(x)
    num_rows, size = x.shape
    kernels.add_rms_norm(ADD_RMS_NORM.pack(
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
        output.data_ptr(), num_rows, size, _IS_BF16[x.dtype], torch.get_num_threads(), eps,
    ))  # fmt: skip
    return output, x if residual is None else residual


def torch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x if residual is None else residual.add_(x)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), residual


def norm_rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LayerCache,
    heads: QKVHeads,
) -> torch.Tensor:
    """Split `qkv` into heads, rotate them, store K and V; return the queries `[N, num_heads, D]`.

    Everything is computed in fp32 and rounded once. RoPE (Su et al., 2021) rotates element i of a
    head's first half with element i of its second half.

    Args:
        qkv: `[N, (num_heads + 2 * num_kv_heads) * D]`.
        rope: `[positions, D]` in fp32, cosines in the first half and sines in the second.
        slot_mapping: `[N]`; slots of the cache in which keys and values are stored.

    Raises IndexError: a position or a slot is out of range (not checked on a GPU).
    """
    dtype, cache_dtype = qkv.dtype, cache.keys.dtype
    num_heads, num_kv_heads, q_norm, k_norm, eps = heads
    kernels = _kernels_for(qkv, q_norm, k_norm)
    if isinstance(kernels, ModuleType) and cache_dtype is dtype:
        return kernels.norm_rope_store(qkv, rope, positions, slot_mapping, cache, heads)
    if (
        not isinstance(kernels, CpuLibrary)
        or not (rope.dtype is torch.float32 and rope.is_contiguous())
        or not (positions.dtype is slot_mapping.dtype is torch.int64)
        or not (positions.is_contiguous() and slot_mapping.is_contiguous())
        or cache_dtype not in CACHES[dtype]
        or not (cache.keys.is_contiguous() and cache.values.is_contiguous())
    ):
        return torch_norm_rope_store(qkv, rope, positions, slot_mapping, cache, heads)
    num_positions, head_dim = rope.shape
    num_blocks, block_size, _, _ = cache.keys.shape
    num_rows, scales = len(qkv), cache.scales
    query = qkv.new_empty(num_rows, num_heads, head_dim)
    status = kernels.norm_rope_store(NORM_ROPE_STORE.pack(
        qkv.data_ptr(), rope.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(),
        cache.keys.data_ptr(), cache.values.data_ptr(), 0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(), query.data_ptr(),
        0 if scales is None else scales.key_factor.data_ptr(),
        0 if scales is None else scales.value_factor.data_ptr(), num_positions,
        num_blocks * block_size, num_rows, num_heads, num_kv_heads, head_dim, DTYPES[dtype],
        DTYPES[cache_dtype], torch.get_num_threads(), eps,
    ))  # fmt: skip
    if status != 0:
        raise IndexError(
            f"a position is not below {num_positions}, or a slot is not one of the KV cache's"
        )
    return query


def torch_norm_rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LayerCache,
    heads: QKVHeads,
) -> torch.Tensor:
    num_heads, num_kv_heads, q_norm, k_norm, eps = heads
    split = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    query, key, value = split.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    key = _norm_rotate(key, k_norm, cos, sin, eps)
    store_kv(key, value, cache, slot_mapping)
    return _norm_rotate(query, q_norm, cos, sin, eps)


def _norm_rotate(
    heads: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = heads.float()
    if norm is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide * scale * norm.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(heads.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU (Shazeer, 2020) in fp32, `[N, 2 I]` to `[N, I]`: SiLU(first) * second."""
    kernels = _kernels_for(gate_up)
    if kernels is None:
        return torch_silu_mul(gate_up)
    if isinstance(kernels, ModuleType):
        return kernels.silu_mul(gate_up)
    num_rows, width = gate_up.shape
    output = gate_up.new_empty(num_rows, width // 2)
    kernels.silu_mul(SILU_MUL.pack(
        gate_up.data_ptr(), output.data_ptr(), num_rows, width // 2, _IS_BF16[gate_up.dtype],
        torch.get_num_threads(),
    ))  # fmt: skip
    return output


def torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up).to(gate_up.dtype)
