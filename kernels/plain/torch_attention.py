"""Paged attention in plain PyTorch, fast enough to use where no other backend runs.

Requests with one query (decodes) are batched: those of similar length share one padded gather and
one call. Requests with more queries run one at a time, in tiles of queries, each over only the keys
that a tile attends to. Keys and values are never copied for grouped queries: in decodes, the query
heads of a group become queries of their KV head; in prefill, the KV head is expanded with stride 0.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.paged_attention import IntArray, PagedBatch, as_bytes

# Queries of a prefill chunk that share one call and one mask. Small tiles skip more keys that none
# of their queries attends to; large ones need fewer calls.
QUERY_TILE = 128
# Requests in a group of decodes have at least this share of the blocks of the longest one.
MIN_FILL = 0.6
# Elements of K to gather for one call. On a CPU this few stay in its cache between the gather and
# the product: 64 requests of 2048 tokens take 20 to 25 ms a layer instead of 59 to 74.
GATHER_ELEMENTS = {"cpu": 1 << 20}
GATHER_ELEMENTS_ELSEWHERE = 1 << 27


class _Decodes(NamedTuple):
    """Requests with one query each, padded to the same number of blocks."""

    tokens: torch.Tensor | slice  # indices of their tokens in the step
    blocks: torch.Tensor  # [rows * blocks of the longest]
    num_rows: int
    mask: torch.Tensor | None  # [rows, 1, 1, keys], added to the scores; None: no padding


class _QueryChunk(NamedTuple):
    """The queries of one request, and the keys that at least one of them attends to."""

    first: int  # index of its first token in the step
    num_queries: int
    blocks: torch.Tensor
    num_skipped: int  # keys at the start of the first block that no query attends to
    num_keys: int  # up to and including the last query's own


class _TorchPlan(NamedTuple):
    decodes: list[_Decodes]
    chunks: list[_QueryChunk]


class TorchAttention:
    """`AttentionBackend` in plain PyTorch, as the module describes."""

    name = "torch"
    is_capturable = False

    def __init__(self) -> None:
        # A tile's mask depends only on the distance between query and key, so all tiles of all
        # requests use slices of one mask, by (window, dtype, device). It grows with the context.
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}
        # Memory for gathered K and V, kept because new memory for each call costs page faults.
        self._scratch: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

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
        num_kv_heads = key_cache.shape[2]
        query = query.unflatten(1, (num_kv_heads, -1))  # [tokens, kv heads, group, head_dim]
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, -1)
        plan = self._plan(batch, sliding_window, query.dtype, key_cache)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)

        for rows in plan.decodes:
            keys, values = (
                gathered.view(rows.num_rows, -1, *gathered.shape[2:]).transpose(1, 2)
                for gathered in self._gather(key_cache, value_cache, rows.blocks, query.dtype)
            )
            output[rows.tokens] = _attend(
                query[rows.tokens], keys, values, rows.mask, scale, softcap, sinks
            )
        for chunk in plan.chunks:
            keys, values = (
                gathered.flatten(0, 1)[chunk.num_skipped : chunk.num_skipped + chunk.num_keys]
                .transpose(0, 1)
                .unsqueeze(1)
                .expand(-1, query.shape[2], -1, -1)
                for gathered in self._gather(key_cache, value_cache, chunk.blocks, query.dtype)
            )
            self._prefill(query, keys, values, chunk, output, scale, sliding_window, softcap, sinks)
        return output.flatten(1, 2)

    def _plan(
        self,
        batch: PagedBatch,
        sliding_window: int | None,
        dtype: torch.dtype,
        key_cache: torch.Tensor,
    ) -> _TorchPlan:
        key = (self.name, sliding_window, dtype)
        plan = batch.plans.get(key)
        if not isinstance(plan, _TorchPlan):
            limit = GATHER_ELEMENTS.get(batch.device.type, GATHER_ELEMENTS_ELSEWHERE)
            blocks_at_once = limit // key_cache[0].numel()
            plan = _make_plan(batch, sliding_window, dtype, blocks_at_once)
            batch.plans[key] = plan
        return plan

    def _gather(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        blocks: torch.Tensor,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Gather the keys and values of `blocks`, each [blocks, block_size, kv heads, head_dim]."""
        shape = (len(blocks), *key_cache.shape[1:])
        size = math.prod(shape)
        gathered = []
        for which, cache in enumerate((key_cache, value_cache)):
            key = (which, cache.dtype, cache.device)
            scratch = self._scratch.get(key)
            if scratch is None or scratch.numel() < size:
                scratch = torch.empty(size, dtype=cache.dtype, device=cache.device)
                self._scratch[key] = scratch
            out = scratch[:size].view(shape)
            torch.index_select(as_bytes(cache), 0, blocks, out=as_bytes(out))
            gathered.append(out.to(dtype))
        return gathered

    def _prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        chunk: _QueryChunk,
        output: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Compute a chunk over keys and values [kv heads, group, keys, dim] into the output."""
        num_before = chunk.num_keys - chunk.num_queries  # keys before the first query's own
        for start in range(0, chunk.num_queries, QUERY_TILE):
            stop = min(start + QUERY_TILE, chunk.num_queries)
            tokens = slice(chunk.first + start, chunk.first + stop)
            first_key = 0
            if sliding_window is not None:
                first_key = max(0, num_before + start - sliding_window + 1)
            last_key = num_before + stop
            attended = _attend(
                query[tokens].permute(1, 2, 0, 3),
                keys[:, :, first_key:last_key],
                values[:, :, first_key:last_key],
                self._tile_mask(stop - start, last_key - first_key, sliding_window, query),
                scale,
                softcap,
                None if sinks is None else sinks[:, :, None],
            )
            output[tokens] = attended.permute(2, 0, 1, 3)

    def _tile_mask(
        self, num_queries: int, num_keys: int, sliding_window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Make the causal mask [num_queries, num_keys] to add to scores."""
        num_before = num_keys - num_queries
        key = (sliding_window, like.dtype, like.device)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] - QUERY_TILE < num_before:
            width = max(1024, 1 << (num_before - 1).bit_length())
            distance = torch.arange(QUERY_TILE, device=like.device)[:, None] - torch.arange(
                -width, QUERY_TILE, device=like.device
            )
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask
        width = mask.shape[1] - QUERY_TILE
        mask = mask[:num_queries, width - num_before : width + num_queries]
        # GPU kernels need masks that begin at aligned addresses.
        return mask if mask.device.type == "cpu" else mask.contiguous()


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute softmax attention; `mask` broadcasts to the scores, `sinks` to their queries."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1]).unsqueeze(-1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(weights.to(values.dtype), values)


def _make_plan(
    batch: PagedBatch, sliding_window: int | None, dtype: torch.dtype, blocks_at_once: int
) -> _TorchPlan:
    num_queries = np.diff(batch.query_starts)
    num_before = batch.context_lens - num_queries
    first_keys = np.zeros_like(num_before)
    if sliding_window is not None:
        first_keys = np.maximum(num_before - sliding_window + 1, 0)
    first_blocks = first_keys // batch.block_size
    num_blocks = -(-batch.context_lens // batch.block_size) - first_blocks

    decode_rows = np.flatnonzero(num_queries == 1)
    chunks = []
    for r in np.flatnonzero(num_queries > 1).tolist():
        blocks = batch.block_tables[r, first_blocks[r] : first_blocks[r] + num_blocks[r]]
        chunks.append(
            _QueryChunk(
                first=int(batch.query_starts[r]),
                num_queries=int(num_queries[r]),
                blocks=torch.from_numpy(blocks).to(batch.device),
                num_skipped=int(first_keys[r] % batch.block_size),
                num_keys=int(batch.context_lens[r] - first_keys[r]),
            )
        )
    decodes = [
        _decodes(batch, rows, first_keys, first_blocks, int(num_blocks[rows].max()), dtype)
        for rows in _groups(decode_rows, num_blocks, blocks_at_once)
    ]
    return _TorchPlan(decodes, chunks)


def _groups(rows: IntArray, num_blocks: IntArray, blocks_at_once: int) -> list[IntArray]:
    """Split decode rows into groups that are padded and computed together.

    In a group, the request with the fewest blocks has at least `MIN_FILL` of the blocks of the one
    with the most. A group gathers at most `blocks_at_once` blocks, unless it is a single row.
    """
    groups: list[IntArray] = []
    left = rows
    while len(left):
        width = int(num_blocks[left].max())
        fits = num_blocks[left] >= MIN_FILL * width
        group, left = left[fits], left[~fits]
        at_once = max(1, blocks_at_once // width)
        groups.extend(group[i : i + at_once] for i in range(0, len(group), at_once))
    return groups


def _decodes(
    batch: PagedBatch,
    rows: IntArray,
    first_keys: IntArray,
    first_blocks: IntArray,
    width: int,
    dtype: torch.dtype,
) -> _Decodes:
    columns = first_blocks[rows, None] + np.arange(width)
    # After a request's last block any valid block will do, because its keys are masked.
    columns = np.minimum(columns, batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[rows[:, None], columns]
    positions = first_blocks[rows, None] * batch.block_size + np.arange(width * batch.block_size)
    hidden = (positions < first_keys[rows, None]) | (positions >= batch.context_lens[rows, None])
    mask = None
    if hidden.any():
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask = mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(batch.device)
        mask = mask[:, None, None]
    first = batch.query_starts[rows]
    contiguous = bool((np.diff(first) == 1).all())
    return _Decodes(
        tokens=slice(int(first[0]), int(first[0]) + len(rows))
        if contiguous
        else torch.from_numpy(first).to(batch.device),
        blocks=torch.from_numpy(blocks.ravel()).to(batch.device),
        num_rows=len(rows),
        mask=mask,
    )
