"""Keys and values in FP8 (e4m3fn: 4 bits of exponent, 3 of mantissa), with half the bytes of bf16.

A number is divided by the scale of its KV head and stored as the nearest FP8 number. Scales are
powers of two. Other scales would not be more precise, because FP8 has an exponent of its own, and
multiplying by powers of two is exact.

Scales are measured once, with a fixed prompt, before the first request. So the stored values of a
token depend neither on how its prompt is cut into chunks nor on other requests of the step.

Attention is linear in the scales: instead of scaling all keys and values, a caller multiplies
queries by the key scale of their KV head, and the result by the value scale. A kernel only has to
widen the numbers it reads.
"""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_ROOM = 2.0  # numbers up to this multiple of the largest measured one fit; others are clamped


class KVScales(NamedTuple):
    """Scales of one layer. A stored number times `key` or `value` is the original number."""

    key: torch.Tensor  # [num_kv_heads, 1, 1] in the queries' dtype, to multiply grouped queries
    value: torch.Tensor
    key_factor: torch.Tensor  # [num_kv_heads] in float32: 1 / key
    value_factor: torch.Tensor


def scales_of(key_cache: torch.Tensor, value_cache: torch.Tensor) -> KVScales:
    """Return scales for a layer, measured on its caches, which must be in full precision."""
    key, value = _scale_of(key_cache), _scale_of(value_cache)
    key_by_head, value_by_head = (
        scale[:, None, None].to(key_cache.dtype) for scale in (key, value)
    )
    return KVScales(key_by_head, value_by_head, 1 / key, 1 / value)


def to_fp8(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Convert `[num_tokens, num_kv_heads, head_dim]` to stored FP8 numbers; NaN stays NaN."""
    return (heads.float() * factor[:, None]).clamp(-LARGEST, LARGEST).to(FP8)


def per_query_head(scale: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Multiply query heads [num_tokens, num_heads, head_dim] by the scales of their KV heads."""
    return (heads.unflatten(1, (len(scale), -1)) * scale).flatten(1, 2)


def _scale_of(cache: torch.Tensor) -> torch.Tensor:
    largest = cache.float().abs().amax(dim=(0, 1, 3)).clamp(min=2.0**-60)
    return torch.exp2(torch.ceil(torch.log2(largest * _ROOM / LARGEST)))
