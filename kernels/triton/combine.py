"""Merges the partial results of a split attention (Flash-Decoding; Dao et al., 2023).

Each split (a part of the keys) leaves two results in fp32. One is a weighted mean of values,
`[num_splits, num_tokens, num_heads, head_dim]`. The other is the base-2 logarithm of the sum of its
weights, `[num_splits, num_tokens, num_heads]`; -inf marks a split without keys, which left no mean.
"""

import torch

import triton
import triton.language as tl

# Splits that are merged at a time.
SPLITS = 8


@triton.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["query_starts"],
)
def _combine(  # type: ignore[no-untyped-def]
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_starts: tl.tensor,
    num_requests: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    DECODE: tl.constexpr,
    SPLITS: tl.constexpr,  # merged at a time
):
    """Each program computes the weighted mean of all splits for one head of one token."""
    head = tl.program_id(0) % NUM_HEADS
    if DECODE:
        request = tl.program_id(0) // NUM_HEADS
        token = tl.load(query_starts + request)
    else:
        token = tl.program_id(0) // NUM_HEADS
        request = 0
        high = num_requests - 1
        while request < high:
            middle = (request + high + 1) // 2
            is_behind = tl.load(query_starts + middle) <= token
            request = tl.where(is_behind, middle, request)
            high = tl.where(is_behind, high, middle - 1)
    first_token = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_token
    if DECODE:
        if num_queries != 1:
            return
    elif num_queries == 1:
        return

    dims = tl.arange(0, HEAD_PAD)
    has_dim = dims < HEAD_DIM
    row = token.to(tl.int64) * NUM_HEADS + head
    stride = num_tokens.to(tl.int64) * NUM_HEADS
    best = tl.full([SPLITS], float("-inf"), tl.float32)
    total = tl.zeros([SPLITS], tl.float32)
    acc = tl.zeros([SPLITS, HEAD_PAD], tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        rows = row + splits * stride
        lse = tl.load(partial_lse + rows, mask=splits < num_splits, other=float("-inf"))
        has_part = lse > float("-inf")  # a split without keys has written no part
        parts = tl.load(
            partial + rows[:, None] * HEAD_DIM + dims[None, :],
            mask=has_part[:, None] & has_dim[None, :],
            other=0.0,
        )
        higher = tl.maximum(best, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(best - base)
        weights = tl.exp2(lse - base)
        total = total * fade + weights
        acc = acc * fade[:, None] + parts * weights[:, None]
        best = higher
    highest = tl.max(best, 0)
    weights = tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest))
    result = tl.sum(acc * weights[:, None], 0)
    sum_of_weights = tl.sum(total * weights, 0)
    result = result / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=has_dim)


def combine(
    output: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    query_starts: torch.Tensor,
    num_requests: int,
    decode: bool,
) -> None:
    """Merge all splits into `output`: rows of requests with one query (`decode`), or with more."""
    num_splits, num_tokens, num_heads, head_dim = partial.shape
    _combine[(num_heads * (num_requests if decode else num_tokens),)](
        output, partial, partial_lse, query_starts, num_requests, num_tokens, num_splits,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(head_dim)), DECODE=decode, SPLITS=SPLITS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
