"""Prefill by an installed FlashAttention: flash-attn 4 or 2.

flash-attn 4 reads the pages of the KV cache where they are. Version 2 needs contiguous keys and
values (its pages have 256 tokens, ours are as small as prefix caching needs): those of a step's
chunks are gathered first, which costs little compared with a chunk's products. Requests with one
query in the step go to another backend, and so do calls with options that FlashAttention lacks.
"""

from collections.abc import Callable, Collection
from functools import partial
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from stepscope.kernels.paged_attention import (
    AttentionBackend,
    AttentionOptions,
    IntArray,
    LayerCache,
    PagedBatch,
    to_device,
)

# Major compute capabilities (Hopper, Blackwell) of which flash-attn 4 reads pages.
_FLASH_ATTN_4 = 9, 10, 11


class Sequences(NamedTuple):
    """Where the queries and the keys of R requests are. Tensors are int32, on the device.

    The last query of a request attends up to its last key.

    Attributes:
        query_starts: request `r` has the queries `query_starts[r]` up to `query_starts[r + 1]`.
        key_starts: the same for its keys, if they are packed (request after request, unpadded).
        pages: `[R, blocks]`, block tables, if the keys are read where they are in the cache.
        key_lens: `[R]`, the number of the keys in those blocks.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int
    pages: torch.Tensor | None = None
    key_lens: torch.Tensor | None = None


class _FlashPlan(NamedTuple):
    """The tokens of a step, split into decodes (None if there are none) and prompt chunks."""

    decodes: PagedBatch | None
    decode_tokens: torch.Tensor  # [decodes], indices into the step's tokens
    chunk_tokens: torch.Tensor
    lens: Sequences  # of the chunks
    slots: torch.Tensor | None  # [keys], slots of the cache, request by request; None: in pages


class FlashAttention:
    """`AttentionBackend` with a library's prefill, as the module describes.

    Attributes:
        dtypes, head_dims: of the calls that the library supports.
        paged_head_dims: those for which it reads pages, of any size.
    """

    name = "flash-attn"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: Collection[int] = range(8, 257, 8)
    paged_head_dims: Collection[int] = ()

    def __init__(
        self, function: Callable[..., Any], version: Literal[2, 4], rest: AttentionBackend
    ) -> None:
        """`function`: `flash_attn_varlen_func` of flash-attn 2.6 or later, or 4, beta 36 or later.

        `rest`: computes what the library does not.
        """
        self.is_capturable = rest.is_capturable
        self._function = function
        self._version = version
        self._rest = rest
        if version == 4:
            self.head_dims = (*range(8, 129, 8), 256)
            self.paged_head_dims = (*range(16, 129, 16), 256)

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        plan = None
        if (
            query.dtype in self.dtypes
            and cache.keys.dtype == query.dtype
            and query.shape[2] in self.head_dims
            and (options.sinks is None or self._version == 4)
        ):
            plan = self._plan(batch, options.sliding_window, query.shape[2])
        if plan is None:
            return self._rest(query, cache, batch, options)
        chunks = query if plan.decodes is None else query[plan.chunk_tokens]
        key, value, _ = cache
        if plan.slots is not None:
            key, value = (each.flatten(0, 1).index_select(0, plan.slots) for each in (key, value))
        attended = self._attend(chunks.contiguous(), key, value, plan.lens, options)
        if plan.decodes is None:
            return attended
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        output[plan.chunk_tokens] = attended
        output[plan.decode_tokens] = self._rest(
            query[plan.decode_tokens], cache, plan.decodes, options
        )
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lens: Sequences,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Call the library with packed queries; keys and values are packed too, or the caches."""
        window, softcap = options.sliding_window, options.softcap or 0.0
        if self._version == 2:
            output: torch.Tensor = self._function(
                query, key, value, lens.query_starts, lens.key_starts, lens.most_queries,
                lens.most_keys, softmax_scale=options.scale, causal=True, softcap=softcap,
                window_size=(-1, -1) if window is None else (window - 1, 0),
            )  # fmt: skip
            return output
        keys = {"page_table": lens.pages, "seqused_k": lens.key_lens}
        if lens.pages is None:
            keys = {"cu_seqlens_k": lens.key_starts}
        # It compiles another kernel for short chunks if it is told the longest chunk.
        output, _ = self._function(
            query, key, value, cu_seqlens_q=lens.query_starts, **keys, softmax_scale=options.scale,
            causal=True, softcap=softcap, learnable_sink=options.sinks,
            window_size=(None, None) if window is None else (window - 1, 0),
        )  # fmt: skip
        return output

    def _plan(
        self, batch: PagedBatch, sliding_window: int | None, head_dim: int
    ) -> _FlashPlan | None:
        """Return the plan of a step; None if no request has more than one query."""
        paged = head_dim in self.paged_head_dims
        key = (self.name, paged, None if paged else sliding_window)
        if key not in batch.plans:
            batch.plans[key] = _make_plan(batch, sliding_window, paged=paged)
        plan = batch.plans[key]
        assert plan is None or isinstance(plan, _FlashPlan)
        return plan


def _make_plan(batch: PagedBatch, sliding_window: int | None, *, paged: bool) -> _FlashPlan | None:
    counts = np.diff(batch.query_starts)
    is_chunk = counts > 1
    if not is_chunk.any():
        return None
    is_decode = counts == 1
    queries, contexts = counts[is_chunk], batch.context_lens[is_chunk]
    tables = batch.block_tables[is_chunk]
    first_keys = np.zeros_like(contexts)
    if sliding_window is not None and not paged:
        first_keys = np.maximum(contexts - queries - sliding_window + 1, 0)
    num_keys = contexts - first_keys
    key_starts = _starts(num_keys)

    on_device = partial(to_device, device=batch.device)
    lens = Sequences(
        query_starts=on_device(_starts(queries)).int(),
        key_starts=on_device(key_starts).int(),
        most_queries=int(queries.max()),
        most_keys=int(num_keys.max()),
    )
    slots = None
    if paged:
        pages, key_lens = on_device(tables).int(), on_device(num_keys).int()
        lens = lens._replace(pages=pages, key_lens=key_lens)
    else:
        positions = np.arange(key_starts[-1]) + np.repeat(first_keys - key_starts[:-1], num_keys)
        blocks = tables[np.repeat(np.arange(len(tables)), num_keys), positions // batch.block_size]
        slots = on_device(blocks * batch.block_size + positions % batch.block_size)
    decodes = None
    if is_decode.any():
        decodes = PagedBatch(
            query_starts=np.arange(int(is_decode.sum()) + 1),
            context_lens=batch.context_lens[is_decode],
            block_tables=batch.block_tables[is_decode],
            slot_mapping=batch.slot_mapping,
            block_size=batch.block_size,
            device=batch.device,
        )
    return _FlashPlan(
        decodes=decodes,
        decode_tokens=on_device(batch.query_starts[:-1][is_decode]),
        chunk_tokens=on_device(np.flatnonzero(np.repeat(is_chunk, counts))),
        lens=lens,
        slots=slots,
    )


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def load_flash_attn(rest: AttentionBackend) -> FlashAttention:
    """Take flash-attn 4 (module `flash_attn.cute`) on Hopper and Blackwell, else flash-attn 2.

    Raises ImportError: neither is installed for this torch and this GPU.
    """
    has_4 = any(True for _ in metadata.distributions(name="flash-attn-4"))
    major, minor = torch.cuda.get_device_capability()
    if has_4 and major in _FLASH_ATTN_4:
        from flash_attn.cute import flash_attn_varlen_func as function

        return FlashAttention(function, 4, rest)
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        if not has_4:
            raise
        needed = ", ".join(map(str, _FLASH_ATTN_4))
        raise ImportError(
            f"flash-attn 4 needs a compute capability of {needed}, this GPU has {major}.{minor}; "
            f"and flash-attn 2 is missing: {error}"
        ) from error
    return FlashAttention(flash_attn_varlen_func, 2, rest)
