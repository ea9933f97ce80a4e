"""The small operations between the matrix products of a decoder layer, each as one call.

Plain torch, for every device; the dtype of the result is that of the input.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.paged_attention import store_kv


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream and normalise it: (normalised, residual), each `[N, D]`.

    `residual` is changed in place and rounded to its dtype; None stands for the first layer, where
    `x` itself becomes the residual. RMSNorm (Zhang and Sennrich, 2019) as Llama and Qwen do it: the
    statistics in fp32, the quotient rounded to the dtype of `x`, then times `weight` in that dtype.
    """
    if residual is None:
        residual = x
    else:
        residual.add_(x)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), residual


def norm_rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Split `qkv` into heads, rotate them, store K and V; the queries `[N, num_heads, D]`.

    `qkv` is `[N, (num_heads + 2 * num_kv_heads) * D]`. With `q_norm`, `k_norm` (`[D]`) each head
    of q and k is RMS-normalised first. RoPE (Su et al., 2021) turns halves of a head against each
    other; `rope` is `[positions, D]` in fp32, cosines in the first half and sines in the second.
    Everything is computed in fp32 and rounded once. Keys and values go to the slots of the paged
    caches that `slot_mapping` (`[N]`) names.
    """
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    key = _norm_rotate(key, k_norm, cos, sin, eps)
    store_kv(key, value, key_cache, value_cache, slot_mapping)
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
    """SwiGLU (Shazeer, 2020): SiLU of the first half times the second; `[N, 2 I]` to `[N, I]`.

    Computed in fp32 and rounded once.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up).to(gate_up.dtype)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of the largest of each row: `[N, V]` to `[N]`, first of equals; NaN is largest."""
    # A CPU's argmax is many times slower in bf16 than the copy and the argmax in fp32.
    return (logits.float() if logits.is_cpu else logits).argmax(dim=-1)
