"""Attention over a paged KV cache: the interface of all backends, and caches in FP8.

The caller owns the tensors; a backend owns only scratch memory. Each backend has its own file;
`backends.py` lists them and chooses one.

Layout of a cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, one tensor for keys and one
for values in each layer. Slot `s` of a cache is block `s // block_size`, offset `s % block_size`.
Its dtype may differ from that of the queries.

A cache in FP8 (e4m3fn: 4 bits of exponent, 3 of mantissa) takes half the bytes of bf16. A number is
divided by the scale of its KV head and stored as the nearest FP8 number. Scales are powers of two:
others would not be more precise, because FP8 has an exponent of its own, and multiplying by powers
of two is exact. They are measured once, with a fixed prompt, before the first request. So the
stored values of a token depend neither on how its prompt is cut into chunks nor on other requests.
Attention is linear in the scales: instead of scaling all keys and values, a caller multiplies
queries by the key scale of their KV head, and the result by the value scale. A kernel only has to
widen the numbers it reads.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
_ROOM = 2.0  # numbers up to this multiple of the largest measured one fit; others are clamped


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to a tensor on `device`, without waiting for work that runs there.

    On a GPU, it copies from page-locked memory, because other copies would wait; torch keeps that
    memory until the copy is done. On a CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class KVScales(NamedTuple):
    """Scales of one layer. A stored number times `key` or `value` is the original number."""

    key: torch.Tensor  # [num_kv_heads, 1, 1] in the queries' dtype, to multiply grouped queries
    value: torch.Tensor
    key_factor: torch.Tensor  # [num_kv_heads] in float32: 1 / key
    value_factor: torch.Tensor


class LayerCache(NamedTuple):
    """The KV cache of one layer, in the layout that the module describes."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None  # of a cache in FP8


class QKVHeads(NamedTuple):
    """The heads in a product of a layer: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    q_norm: torch.Tensor | None  # [head_dim]; each head of the queries is RMS-normalised with it
    k_norm: torch.Tensor | None
    eps: float  # of these norms


class AttentionOptions(NamedTuple):
    """How a layer attends.

    The query at position `q` of a request attends to its keys at `k <= q`. With a sliding window,
    it attends only to those with `k > q - sliding_window`. Scores are `scale * q.k`; a softcap
    turns them into `softcap * tanh(score / softcap)`. `sinks` (`[num_heads]`) add one score per
    head to the softmax, without a value.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class BatchTensors(NamedTuple):
    """The arrays of a `PagedBatch` on the device (int32), for kernels that read them there.

    They may be longer than the step needs. The surplus requests at the end have one query and a
    context of no tokens each.
    """

    query_starts: torch.Tensor  # [R + 1]
    context_lens: torch.Tensor  # [R]
    block_tables: torch.Tensor  # [R, blocks], rows contiguous


@dataclass(slots=True, eq=False)
class PagedBatch:
    """The tokens of one step and their places in the KV cache; the same for all layers.

    The tokens of R requests are in order, one request after the other. The arrays on the host allow
    planning without waiting for a device.

    Attributes:
        query_starts: request `r` has the queries `query_starts[r]` up to `query_starts[r + 1]`.
        context_lens: tokens of each request so far; its queries are the last of them.
        block_tables: `[r, i]` is the block that holds tokens `[i * block_size, ...)` of request
            `r`; entries after its last block are ids of any valid blocks.
    """

    query_starts: IntArray  # [R + 1]
    context_lens: IntArray  # [R], the tokens of this step included
    block_tables: IntArray  # [R, blocks]
    slot_mapping: torch.Tensor  # [num_tokens] int64, on the device: where new keys go
    block_size: int
    device: torch.device
    plans: dict[Hashable, object] = field(default_factory=dict)  # a backend's plans for this step
    # [R], 1 if the only query of a request is a decode, so that a prompt chunk of one token can be
    # computed like any other chunk. None: every request with one query is a decode.
    decodes: IntArray | None = None
    tensors: BatchTensors | None = None  # set by the maker of the batch, or by `on_device`

    def on_device(self) -> BatchTensors:
        """Return the arrays on the device. The first call copies them, unless `tensors` is set."""
        if self.tensors is None:
            arrays = self.query_starts, self.context_lens, self.block_tables
            self.tensors = BatchTensors(
                *(to_device(each.astype(np.int32), self.device) for each in arrays)
            )
        return self.tensors


class AttentionBackend(Protocol):
    """Causal attention of the queries of a step over the paged keys and values of their requests.

    `query` and the result are `[num_tokens, num_heads, head_dim]`.
    """

    name: str
    is_capturable: bool
    """Whether the launches of decodes depend only on the shapes of the batch's tensors, so that a
    CUDA graph can capture them."""

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor: ...


def scales_of(cache: LayerCache) -> KVScales:
    """Return scales for a layer, measured on its cache, which must be in full precision."""
    key, value = _scale_of(cache.keys), _scale_of(cache.values)
    key_by_head, value_by_head = (
        scale[:, None, None].to(cache.keys.dtype) for scale in (key, value)
    )
    return KVScales(key_by_head, value_by_head, 1 / key, 1 / value)


def to_fp8(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Convert `[num_tokens, num_kv_heads, head_dim]` to stored FP8 numbers; NaN stays NaN."""
    return (heads.float() * factor[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def per_query_head(scale: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Multiply query heads [num_tokens, num_heads, head_dim] by the scales of their KV heads."""
    return (heads.unflatten(1, (len(scale), -1)) * scale).flatten(1, 2)


def _scale_of(cache: torch.Tensor) -> torch.Tensor:
    largest = cache.float().abs().amax(dim=(0, 1, 3)).clamp(min=2.0**-60)
    return torch.exp2(torch.ceil(torch.log2(largest * _ROOM / LARGEST_FP8)))


@dataclass(slots=True)
class StepContext:
    """The KV caches of one step, and the attention backend that reads them."""

    batch: PagedBatch
    caches: Sequence[LayerCache]  # one for each layer
    backend: AttentionBackend

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Call the attention backend on a layer's cache, with the scales of an FP8 cache."""
        cache = self.caches[layer]
        if cache.scales is None:
            return self.backend(query, cache, self.batch, options)
        query = per_query_head(cache.scales.key, query)
        output = self.backend(query, cache, self.batch, options)
        return per_query_head(cache.scales.value, output)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_dim] into slots, scaled for FP8."""
    if (scales := cache.scales) is not None:
        key, value = to_fp8(key, scales.key_factor), to_fp8(value, scales.value_factor)
    for heads, slots in ((key, cache.keys), (value, cache.values)):
        stored = as_bytes(heads.to(slots.dtype))
        as_bytes(slots).flatten(0, 1).index_copy_(0, slot_mapping, stored)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View an FP8 tensor as uint8, because torch can neither gather nor scatter FP8."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor
