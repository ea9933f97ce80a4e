"""Paged attention in plain PyTorch, fast enough to use where no other backend runs.

Requests with one query (decodes) are batched: those of similar length share one padded gather and
one call. Requests with more queries run one at a time, in tiles of queries, each over only the keys
that a tile attends to. Keys and values are never copied for grouped queries: in decodes, the query
heads of a group become queries of their KV head; in prefill, the KV head is expanded with stride 0.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.paged_attention import (
    AttentionOptions,
    IntArray,
    LayerCache,
    PagedBatch,
    as_bytes,
    to_device,
)

# Queries of a prefill chunk that share one call and one mask. Small tiles skip more keys that none
# of their queries attends to; large ones need fewer calls.
QUERY_TILE = 128
# Elements of K to gather for one call. On a CPU this few stay in its cache between the gather and
# the product: 64 requests of 2048 tokens take 20 to 25 ms a layer instead of 59 to 74.
GATHER_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


class _Together(NamedTuple):
    """Requests that are computed together: decodes of similar length, or one chunk."""

    tokens: torch.Tensor  # [queries], indices of their tokens in the step
    blocks: torch.Tensor  # [rows, blocks of the longest]
    positions: torch.Tensor  # [rows, keys], of the keys in these blocks
    ends: torch.Tensor  # [rows], tokens of each request
    # Indices of the keys after the end of their request, with all rows one after another. Another
    # request may have left NaN there, and NaN times a weight of 0 is NaN.
    beyond: torch.Tensor
    first_key: int  # position of the first key of the first row
    num_before: int  # its tokens before the step


class TorchAttention:
    name = "torch"
    is_capturable = False

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        scale, sliding_window, softcap, sinks = options
        num_kv_heads = cache.keys.shape[2]
        query = query.unflatten(1, (num_kv_heads, -1))  # [tokens, kv heads, group, head_dim]
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, -1)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows in _plan(batch, sliding_window, cache.keys[0].numel()):
            keys, values = (
                as_bytes(each)
                .index_select(0, rows.blocks.flatten())
                .view(each.dtype)
                .to(query.dtype)
                .flatten(0, 1)
                .index_fill_(0, rows.beyond, 0.0)
                .view(len(rows.blocks), -1, *each.shape[2:])
                for each in (cache.keys, cache.values)
            )  # [rows, keys, kv heads, head_dim]
            if len(rows.tokens) == len(rows.blocks):
                visible = _visible(rows.positions, rows.ends[:, None] - 1, sliding_window)
                output[rows.tokens] = _attend(
                    query[rows.tokens], keys.transpose(1, 2), values.transpose(1, 2),
                    visible[:, None, None], scale, softcap, sinks,
                )  # fmt: skip
                continue
            keys, values = (
                each[0].transpose(0, 1).unsqueeze(1).expand(-1, query.shape[2], -1, -1)
                for each in (keys, values)
            )  # [kv heads, group, keys, head_dim]
            for start in range(0, len(rows.tokens), QUERY_TILE):
                tokens = rows.tokens[start : start + QUERY_TILE]
                first, end = rows.num_before + start, rows.num_before + start + len(tokens)
                seen_from = 0 if sliding_window is None else max(0, first - sliding_window + 1)
                seen = slice(seen_from - rows.first_key, end - rows.first_key)
                at = torch.arange(first, end, device=query.device)[:, None]
                attended = _attend(
                    query[tokens].permute(1, 2, 0, 3), keys[:, :, seen], values[:, :, seen],
                    _visible(rows.positions[0, seen], at, sliding_window), scale, softcap,
                    None if sinks is None else sinks[:, :, None],
                )  # fmt: skip
                output[tokens] = attended.permute(2, 0, 1, 3)
        return output.flatten(1, 2)


def _visible(keys: torch.Tensor, queries: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which keys each query attends to, by the positions of both."""
    visible = keys <= queries
    return visible if sliding_window is None else visible & (keys > queries - sliding_window)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention; `visible` broadcasts to the scores, `sinks` to their queries."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1]).unsqueeze(-1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(weights.to(values.dtype), values)


def _plan(batch: PagedBatch, sliding_window: int | None, block_elements: int) -> list[_Together]:
    """Divide a step into what is computed together; the same for all layers with this window."""
    key = (TorchAttention.name, sliding_window)
    plan = batch.plans.get(key)
    if isinstance(plan, list):
        return plan
    num_queries = np.diff(batch.query_starts)
    first_keys = np.zeros_like(num_queries)
    if sliding_window is not None:
        first_keys = np.maximum(batch.context_lens - num_queries - sliding_window + 1, 0)
    first_blocks = first_keys // batch.block_size
    num_blocks = -(-batch.context_lens // batch.block_size) - first_blocks
    blocks_at_once = GATHER_ELEMENTS[batch.device.type] // block_elements
    groups = _groups(np.flatnonzero(num_queries == 1), num_blocks, blocks_at_once)
    groups += [np.array([r]) for r in np.flatnonzero(num_queries > 1)]
    plan = [_rows(batch, rows, first_blocks[rows, None], num_blocks[rows].max()) for rows in groups]
    batch.plans[key] = plan
    return plan


def _rows(batch: PagedBatch, rows: IntArray, first_blocks: IntArray, width: int) -> _Together:
    # After a request's last block any valid block will do, because its keys are not visible.
    columns = np.minimum(first_blocks + np.arange(width), batch.block_tables.shape[1] - 1)
    positions = first_blocks * batch.block_size + np.arange(width * batch.block_size)
    first, end = batch.query_starts[rows], batch.query_starts[rows + 1]
    tokens = first if len(rows) > 1 else np.arange(first[0], end[0])
    context_lens = batch.context_lens[rows]
    beyond = np.flatnonzero(positions >= context_lens[:, None])
    blocks = batch.block_tables[rows[:, None], columns]
    arrays = tokens, blocks, positions, context_lens, beyond
    at, blocks, keys, ends, beyond = (to_device(each, batch.device) for each in arrays)
    num_before = int(batch.context_lens[rows[0]] - len(tokens))
    return _Together(at, blocks, keys, ends, beyond, int(positions[0, 0]), num_before)


def _groups(rows: IntArray, num_blocks: IntArray, blocks_at_once: int) -> list[IntArray]:
    """Split decode rows into groups of similar lengths, which are padded and computed together.

    A group gathers at most `blocks_at_once` blocks, unless it is a single row.
    """
    groups: list[IntArray] = []
    rows = rows[np.argsort(-num_blocks[rows], kind="stable")]
    while len(rows):
        at_once = max(1, blocks_at_once // int(num_blocks[rows[0]]))
        groups.append(rows[:at_once])
        rows = rows[at_once:]
    return groups
