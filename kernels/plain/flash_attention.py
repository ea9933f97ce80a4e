"""Prefill by an installed FlashAttention: the flash-attn package, or the version in torch.

Both need contiguous keys and values (their pages have 256 tokens, ours are as small as prefix
caching needs). So the keys and values for a step's chunks are gathered first, which costs little
compared with a chunk's products. Requests with one query in the step go to another backend, and so
do calls with options that FlashAttention lacks.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from stepscope.kernels.paged_attention import AttentionBackend, IntArray, PagedBatch, to_device


class VarlenFunction(Protocol):
    """Causal attention of packed queries over packed keys (requests one after the other, unpadded).

    The last query of a request attends up to its last key.

    Args:
        query: `[num_queries, num_heads, head_dim]`.
        key, value: `[num_keys, num_kv_heads, head_dim]`.
        query_starts: request `r` has the queries `query_starts[r]` up to `query_starts[r + 1]`
            (int32, on the device).
        key_starts: the same for its keys.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


class Varlen(NamedTuple):
    """A `VarlenFunction` of a library, and the calls that it supports."""

    attend: VarlenFunction
    has_softcap: bool
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim: int = 256
    head_dim_multiple: int = 8


class _FlashPlan(NamedTuple):
    """The tokens of a step, split into decodes (None if there are none) and prompt chunks."""

    decodes: PagedBatch | None
    decode_tokens: torch.Tensor  # [decodes], indices into the step's tokens
    chunk_tokens: torch.Tensor
    query_starts: torch.Tensor  # int32
    key_starts: torch.Tensor  # int32
    slots: torch.Tensor  # [keys], slots of the cache, request by request
    most_queries: int
    most_keys: int


class GatheredAttention:
    """`AttentionBackend` with FlashAttention's prefill, as the module describes."""

    def __init__(self, name: str, varlen: Varlen, rest: AttentionBackend) -> None:
        self.name = name
        self.is_capturable = rest.is_capturable
        self._varlen = varlen
        self._rest = rest

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = None
        if sinks is None and self._takes(query, key_cache, softcap):
            plan = self._plan(batch, sliding_window)
        if plan is None:
            return self._rest(
                query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window,
                softcap=softcap, sinks=sinks,
            )  # fmt: skip
        chunks = query if plan.decodes is None else query[plan.chunk_tokens]
        attended = self._varlen.attend(
            chunks.contiguous(), key_cache.flatten(0, 1).index_select(0, plan.slots),
            value_cache.flatten(0, 1).index_select(0, plan.slots), plan.query_starts,
            plan.key_starts, plan.most_queries, plan.most_keys, scale, sliding_window, softcap,
        )  # fmt: skip
        if plan.decodes is None:
            return attended
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        output[plan.chunk_tokens] = attended
        output[plan.decode_tokens] = self._rest(
            query[plan.decode_tokens], key_cache, value_cache, plan.decodes, scale=scale,
            sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
        return output

    def _takes(self, query: torch.Tensor, key_cache: torch.Tensor, softcap: float | None) -> bool:
        head_dim = query.shape[2]
        return (
            query.dtype in self._varlen.dtypes
            and key_cache.dtype == query.dtype
            and head_dim <= self._varlen.max_head_dim
            and head_dim % self._varlen.head_dim_multiple == 0
            and (softcap is None or self._varlen.has_softcap)
        )

    def _plan(self, batch: PagedBatch, sliding_window: int | None) -> _FlashPlan | None:
        """Return the plan of a step; None if no request has more than one query."""
        key = (self.name, sliding_window)
        if key not in batch.plans:
            batch.plans[key] = _make_plan(batch, sliding_window)
        plan = batch.plans[key]
        assert plan is None or isinstance(plan, _FlashPlan)
        return plan


def _make_plan(batch: PagedBatch, sliding_window: int | None) -> _FlashPlan | None:
    counts = np.diff(batch.query_starts)
    is_chunk = counts > 1
    if not is_chunk.any():
        return None
    is_decode = counts == 1
    queries, contexts = counts[is_chunk], batch.context_lens[is_chunk]
    first_keys = np.zeros_like(contexts)
    if sliding_window is not None:
        first_keys = np.maximum(contexts - queries - sliding_window + 1, 0)
    num_keys = contexts - first_keys
    key_starts = _starts(num_keys)
    positions = np.arange(key_starts[-1]) + np.repeat(first_keys - key_starts[:-1], num_keys)
    tables = batch.block_tables[is_chunk]
    blocks = tables[np.repeat(np.arange(len(tables)), num_keys), positions // batch.block_size]
    slots = blocks * batch.block_size + positions % batch.block_size

    def on_device(array: IntArray) -> torch.Tensor:
        return to_device(array, batch.device)

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
        query_starts=on_device(_starts(queries)).int(),
        key_starts=on_device(key_starts).int(),
        slots=on_device(slots),
        most_queries=int(queries.max()),
        most_keys=int(num_keys.max()),
    )


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def load_flash_attn() -> Varlen:
    """Load the flash-attn package (Dao, 2023). Raises ImportError without one for this torch."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen(flash_attn_varlen_func)


def flash_attn_varlen(function: Callable[..., torch.Tensor]) -> Varlen:
    """Wrap `flash_attn_varlen_func` of flash-attn 2.6 or later."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return function(
            query, key, value, query_starts, key_starts, most_queries, most_keys,
            softmax_scale=scale, causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            softcap=softcap or 0.0,
        )  # fmt: skip

    return Varlen(attend, has_softcap=True)


def load_torch_varlen() -> Varlen:
    """Load torch's own varlen attention, new in 2.10. Raises ImportError if it does not fit."""
    from torch.nn.attention import varlen

    return torch_varlen(varlen.varlen_attn)


def torch_varlen(function: Callable[..., torch.Tensor]) -> Varlen:
    """Wrap `torch.nn.attention.varlen.varlen_attn`, or raise ImportError if it lacks arguments."""
    known = inspect.signature(function).parameters
    missing = [name for name in ("scale", "window_size") if name not in known]
    if missing:
        raise ImportError(f"varlen_attn of torch {torch.__version__} has no {missing[0]}")
    # Versions without this argument accept fewer KV heads than query heads anyway.
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        assert softcap is None
        return function(
            query, key, value, query_starts, key_starts, most_queries, most_keys, scale=scale,
            window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0), **grouped,
        )  # fmt: skip

    return Varlen(attend, has_softcap=False)
