"""Paged attention in Triton for a GPU: decodes, prefill chunks and any mixture of them.

The query heads that share a KV head are rows of one tile (packed GQA), so keys and values are read
once for all of them. The softmax is the online softmax of FlashAttention (Dao et al., 2022), in
base 2. A program finds the request of its queries by bisecting `query_starts`.

Long contexts are split among programs, whose partial results `combine.py` merges by their weights
(Flash-Decoding; Dao et al., 2023). Into how many parts depends on the amount of work
(`num_splits`), never on a batch size.

A kernel reads the layout of a step from device tensors (`PagedBatch.on_device`), and a program
without work ends at once. So a launch captured in a CUDA graph stays correct when the content of
these tensors changes.

Shapes: queries and output `[num_tokens, num_heads, head_dim]`, caches
`[num_blocks, block_size, num_kv_heads, head_dim]`. All have one dtype, except that the caches may
have a smaller one. Any head_dim up to 256, any group and block size.
"""

import math

import torch

import triton
import triton.language as tl
from stepscope.kernels.paged_attention import AttentionOptions, LayerCache, PagedBatch
from stepscope.kernels.triton.combine import combine
from stepscope.kernels.triton.plan import Device, plan_launches

LOG2_E = math.log2(math.e)


@triton.jit
def _request_of(starts: tl.tensor, block: tl.tensor, num_requests: tl.tensor, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the request to which query block number `block` (of `Q` queries) belongs.

    Each request begins a new block, so request `r` has the blocks from `starts[r] // Q + r` on. It
    may have one block more than it needs.
    """
    low = 0
    high = num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_behind = tl.load(starts + middle) // Q + middle <= block
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle - 1)
    return low


@triton.jit(
    do_not_specialize=[
        *("num_requests", "num_tokens", "num_splits", "first_block", "table_stride", "window")
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_tables"],
)
def _attend(  # type: ignore[no-untyped-def]
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    sinks: tl.tensor,  # [num_heads] fp32
    output: tl.tensor,
    partial: tl.tensor,  # [num_splits, num_tokens, num_heads, head_dim] fp32
    partial_lse: tl.tensor,  # [num_splits, num_tokens, num_heads] fp32, in base 2
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    scale: tl.tensor,  # times log2(e), unless there is a softcap
    softcap: tl.tensor,
    window: tl.tensor,
    num_requests: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    first_block: tl.tensor,
    table_stride: tl.tensor,
    token_stride: tl.tensor,  # of the queries
    head_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,  # True: requests with one query each; False: those with more
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in fp32, because Triton's interpreter has no bf16
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Each program computes a tile of rows (queries times heads of a group) over some keys."""
    QUERIES: tl.constexpr = 1 if DECODE else ROWS // GROUP
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    program = tl.program_id(0)
    split = tl.program_id(1)
    kv_head = program % NUM_KV_HEADS
    # The last queries of a chunk have the most keys, so they start first.
    block = first_block + (tl.num_programs(0) - 1 - program) // NUM_KV_HEADS
    if DECODE:
        request = block
    else:
        request = _request_of(query_starts, block, num_requests, QUERIES)
    first_token = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_token
    context_len = tl.load(context_lens + request)
    if DECODE:
        first_query = 0
        if num_queries != 1:
            return
    else:
        first_query = (block - (first_token // QUERIES + request)) * QUERIES
        if num_queries == 1 or first_query >= num_queries:
            return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    query_idx = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    has_row = (rows < QUERIES * GROUP) & (query_idx < num_queries)
    tokens = (first_token + query_idx).to(tl.int64)
    positions = context_len - num_queries + query_idx

    # The key tiles that at least one query here attends to, and this program's share of them.
    first_position = context_len - num_queries + first_query
    end_key = tl.minimum(first_position + QUERIES, context_len)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - window + 1, 0) // KEYS
    end_tile = (end_key + KEYS - 1) // KEYS
    if SPLIT:
        share = (end_tile - first_tile + num_splits - 1) // num_splits
        first_tile = first_tile + split * share
        end_tile = tl.minimum(first_tile + share, end_tile)
        partial_rows = (split.to(tl.int64) * num_tokens + tokens) * NUM_HEADS + heads
        if (first_tile >= end_tile) & (split > 0):
            nothing = tl.full([ROWS], float("-inf"), tl.float32)
            tl.store(partial_lse + partial_rows, nothing, mask=has_row)
            return
    # Tiles in which all queries attend to all keys need no mask, and get a loop of their own. Not
    # in decodes: they wait for memory, not for masks, and a second loop would begin its first loads
    # only after the first loop has ended.
    FIRST_PHASE: tl.constexpr = 1 if DECODE or HAS_WINDOW else 0
    masked_tile = first_tile
    if FIRST_PHASE == 0:
        masked_tile = tl.maximum(first_tile, tl.minimum((first_position + 1) // KEYS, end_tile))

    has_dim = dims < HEAD_DIM
    q = tl.load(
        query + tokens[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :],
        mask=has_row[:, None] & has_dim[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and split == 0:
        best = tl.load(sinks + heads, mask=has_row, other=0.0) * 1.4426950408889634
        total = total + 1.0
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)

    table = block_tables + request.to(tl.int64) * table_stride
    for phase in tl.static_range(FIRST_PHASE, 2):
        begin = first_tile if phase == 0 else masked_tile
        end = masked_tile if phase == 0 else end_tile
        for tile in range(begin, end):
            keys = tile * KEYS + tl.arange(0, KEYS)
            if phase == 0:
                pages = tl.load(table + keys // BLOCK_SIZE)
            else:
                pages = tl.load(table + keys // BLOCK_SIZE, mask=keys < end_key, other=0)
            slots = pages.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
            if phase == 1:
                is_there = (keys < end_key)[:, None] & has_dim[None, :]
                k = tl.load(key_cache + offsets, mask=is_there, other=0.0)
                v = tl.load(value_cache + offsets, mask=is_there, other=0.0)
            elif HEAD_DIM == HEAD_PAD:
                k = tl.load(key_cache + offsets)
                v = tl.load(value_cache + offsets)
            else:
                k = tl.load(key_cache + offsets, mask=has_dim[None, :], other=0.0)
                v = tl.load(value_cache + offsets, mask=has_dim[None, :], other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # softcap * tanh(scores / softcap), in base 2, without overflow at either end.
                tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.8853900817779268 / softcap)) + 1.0)
                scores = tanh * (softcap * 1.4426950408889634)
            if phase == 1:
                visible = keys[None, :] <= positions[:, None]
                if HAS_WINDOW:
                    visible = visible & (keys[None, :] > positions[:, None] - window)
                scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            base = higher
            if phase == 1:
                base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no visible key yet
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(best - base)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
            best = higher

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store = has_row[:, None] & has_dim[None, :]
    if SPLIT:
        tl.store(partial_lse + partial_rows, best + tl.log2(total), mask=has_row)
        tl.store(partial + partial_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=store)
    else:
        offsets = (tokens * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + offsets, result.to(output.dtype.element_ty), mask=store)


class TritonAttention:
    name = "triton"
    is_capturable = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        scale, sliding_window, softcap, sinks = options
        if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
            raise ValueError("the KV cache of a layer must be contiguous")
        if query.stride(2) != 1:
            query = query.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tensors = batch.on_device()
        num_tokens, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = cache.keys.shape
        num_requests = len(tensors.context_lens)
        key = (self.name, sliding_window, query.shape[1:], query.dtype, cache.keys.shape)
        launches = batch.plans.get(key)
        if not isinstance(launches, list):  # planned by the first call, from the arrays on the host
            launches = batch.plans[key] = plan_launches(
                batch,
                sliding_window,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                itemsize=query.dtype.itemsize,
                device=self._device,
            )
        for launch in launches:
            is_split = launch.num_splits > 1
            # Unused arguments must still be pointers.
            partial = lse = output
            if is_split:
                shape = launch.num_splits, num_tokens, num_heads
                partial = query.new_empty((*shape, head_dim), dtype=torch.float32)
                lse = query.new_empty(shape, dtype=torch.float32)
            tile = launch.tile
            _attend[(num_kv_heads * launch.num_blocks, launch.num_splits)](
                query, cache.keys, cache.values, output if sinks is None else sinks, output,
                partial, lse, *tensors, scale * (LOG2_E if softcap is None else 1.0),
                1.0 if softcap is None else softcap, sliding_window or 0, num_requests, num_tokens,
                launch.num_splits, launch.first_block, tensors.block_tables.stride(0),
                query.stride(0), query.stride(1), GROUP=num_heads // num_kv_heads,
                NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
                HEAD_PAD=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
                DECODE=launch.decode, SPLIT=is_split, HAS_WINDOW=sliding_window is not None,
                HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
                UPCAST=self._device.is_interpreted, ROWS=tile.rows, KEYS=tile.keys,
                num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
            )  # fmt: skip
            if is_split:
                combine(output, partial, lse, tensors.query_starts, num_requests, launch.decode)
        return output
