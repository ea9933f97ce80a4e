"""Paged attention in C++ on a CPU; it reads keys and values in place, without gathering them.

The arguments that are the same for all layers are put into a C structure once in a step and kept in
`PagedBatch.plans`, so that a call only passes pointers.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepscope.kernels.cpu.library import ATTENTION, CACHES, DTYPES, STEP, CpuLibrary
from stepscope.kernels.paged_attention import AttentionOptions, IntArray, LayerCache, PagedBatch


class _CpuPlan(NamedTuple):
    address: int  # of `step`
    step: ctypes.Array[ctypes.c_char]
    arrays: tuple[IntArray, ...]  # kept alive, because `step` points to them


class CpuAttention:
    """`AttentionBackend` in C++. No result depends on the batch, the chunks, or the threads."""

    name = "cpu"
    is_capturable = False

    def __init__(self, library: CpuLibrary) -> None:
        self._attention = library.attention

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        key = (query.dtype, query.shape[1:], cache.keys.dtype, cache.keys.shape, *options[:3])
        plan = batch.plans.get(key)
        if not isinstance(plan, _CpuPlan):
            plan = batch.plans[key] = _make_plan(query, cache.keys, batch, options)
        query = query.contiguous()
        output = torch.empty_like(query)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        status = self._attention(ATTENTION.pack(
            plan.address, query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), output.data_ptr(), torch.get_num_threads(),
        ))  # fmt: skip
        if status != 0:
            raise IndexError("a block table names a block that is not in the KV cache")
        return output


def _make_plan(
    query: torch.Tensor, key_cache: torch.Tensor, batch: PagedBatch, options: AttentionOptions
) -> _CpuPlan:
    if key_cache.dtype not in CACHES.get(query.dtype, ()):
        raise TypeError(f"no kernel for queries of {query.dtype} and keys of {key_cache.dtype}")
    if not key_cache.is_contiguous():
        raise ValueError("the KV cache of a layer must be contiguous")
    arrays = tuple(
        np.ascontiguousarray(array, dtype=np.int64)
        for array in (batch.query_starts, batch.context_lens, batch.block_tables, _decodes(batch))
    )
    query_starts, context_lens, block_tables, decodes = arrays
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    packed = STEP.pack(
        query_starts.ctypes.data, context_lens.ctypes.data, block_tables.ctypes.data,
        decodes.ctypes.data, block_tables.shape[1], len(batch.context_lens), num_blocks, block_size,
        query.shape[1], num_kv_heads, head_dim, DTYPES[query.dtype], DTYPES[key_cache.dtype],
        options.sliding_window or 0, options.scale, options.softcap or 0.0,
    )  # fmt: skip
    step = ctypes.create_string_buffer(packed, len(packed))
    return _CpuPlan(ctypes.addressof(step), step, arrays)


def _decodes(batch: PagedBatch) -> IntArray | npt.NDArray[np.bool_]:
    """Return `[R]`: is the only query a decode? Raises ValueError for one with more queries."""
    counts = np.diff(batch.query_starts)
    if batch.decodes is None:
        return counts == 1
    if ((batch.decodes != 0) & (counts != 1)).any():
        raise ValueError("a request of the step is marked as a decode, and a decode has one query")
    return batch.decodes
