"""Keys and values in FP8 (e4m3fn: 4 bits of exponent, 3 of mantissa): half the bytes of bf16.

A number is stored as the FP8 number nearest to it, over the scale of its KV head. Scales are powers
of two: FP8 has its own exponent, so others would not be more precise, and to multiply by these is
exact. They are found once, from a fixed prompt, before the first request. So what is stored for a
token depends neither on how its prompt is cut into chunks nor on its neighbours.

Attention is linear in the scales: that of a key head is multiplied into its queries, that of a
value head into the result. A kernel only has to widen what it reads.
"""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_ROOM = 2.0  # numbers so much larger than any seen still fit; beyond, the largest is stored


class KVScales(NamedTuple):
    """Of one layer. What is stored times `key` or `value` is the number."""

    key: torch.Tensor  # [num_kv_heads, 1, 1], as the queries are: a head times its group's queries
    value: torch.Tensor
    key_factor: torch.Tensor  # [num_kv_heads] in float32: 1 / key
    value_factor: torch.Tensor


def scales_of(key_cache: torch.Tensor, value_cache: torch.Tensor) -> KVScales:
    """Scales for numbers like those in the caches of a layer, which are in full precision."""
    key, value = _scale_of(key_cache), _scale_of(value_cache)
    key_by_head, value_by_head = (
        scale[:, None, None].to(key_cache.dtype) for scale in (key, value)
    )
    return KVScales(key_by_head, value_by_head, 1 / key, 1 / value)


def to_fp8(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, num_kv_heads, head_dim]` as it is stored; NaN stays NaN."""
    return (heads.float() * factor[:, None]).clamp(-LARGEST, LARGEST).to(FP8)


def per_query_head(scale: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """`heads` `[num_tokens, num_heads, head_dim]` times the scale of the KV head of each."""
    return (heads.unflatten(1, (len(scale), -1)) * scale).flatten(1, 2)


def _scale_of(cache: torch.Tensor) -> torch.Tensor:
    largest = cache.float().abs().amax(dim=(0, 1, 3)).clamp(min=2.0**-60)
    return torch.exp2(torch.ceil(torch.log2(largest * _ROOM / LARGEST)))
