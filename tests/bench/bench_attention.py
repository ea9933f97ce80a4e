"""One layer of attention on this CPU: the C++ backend, the torch backend, and torch's own SDPA.

SDPA gets dense keys and values of the same shape (nothing to gather, no padding, all of one
length), which is its best case. All are timed in turns, `--repeat` rounds, and the
medians shown: on a shared machine trust the ratios. In the same turns a yardstick runs: for decodes
the sum of the same keys and values in fp32, read in order (the share is its time by ours, so a
short context is held to the rate of a cache); for chunks a product of 1024 x 1024 matrices (the
share is of its FLOP/s).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.dispatch.backends import choose
from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch

BLOCK_SIZE = 16
HEADS = ((6, 2, 64), (9, 3, 64), (8, 2, 128))
DECODES = [(batch, context) for batch in (1, 16, 64) for context in (128, 512, 4096)]
CHUNKS = [(128, 128), (128, 2048), (512, 512), (512, 2048), (2048, 2048)]
PRODUCT_SIZE = 1024
TIME_LIMIT_S = 0.25  # of one contender in one round: long ones run fewer times


class Case(NamedTuple):
    """A step of `batch` requests with `num_queries` each, the last of `context` tokens."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: PagedBatch
    dense: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None


def make_case(
    heads: tuple[int, int, int], batch: int, num_queries: int, context: int, dtype: torch.dtype
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    blocks_each = -(-context // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(batch * blocks_each, generator=generator).view(batch, blocks_each)
    shape = (batch * blocks_each, BLOCK_SIZE, num_kv_heads, head_dim)
    query = torch.randn(batch * num_queries, num_heads, head_dim, generator=generator).to(dtype)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    dense = [
        cache[blocks].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in caches
    ]
    mask = None
    if 1 < num_queries < context:
        position = torch.arange(context)
        mask = position <= position[-num_queries:, None]
    return Case(
        query,
        *caches,
        PagedBatch(
            query_starts=np.arange(batch + 1) * num_queries,
            context_lens=np.full(batch, context),
            block_tables=blocks.numpy(),
            slot_mapping=torch.zeros(batch * num_queries, dtype=torch.int64),
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        ),
        (query.view(batch, num_queries, num_heads, -1).transpose(1, 2), dense[0], dense[1]),
        mask,
    )


def paged(backend: AttentionBackend, case: Case) -> Callable[[], object]:
    scale = case.query.shape[-1] ** -0.5
    return lambda: backend(*case[:4], scale=scale)


def sdpa(case: Case, num_queries: int, context: int) -> Callable[[], object]:
    return lambda: F.scaled_dot_product_attention(
        *case.dense,
        attn_mask=case.mask,
        is_causal=num_queries > 1 and num_queries == context,
        enable_gqa=True,
    )


def medians_us(contenders: list[Callable[[], object]], repeat: int) -> list[float]:
    """Medians of `repeat` rounds in which each runs as often as fits into TIME_LIMIT_S / repeat.

    One thread is timed by the processor time that it gets, so that what others run beside it costs
    only caches and bandwidth; several are timed by the clock.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    counts = []
    for run in contenders:
        run()
        start = clock()
        run()
        once = max(clock() - start, 1e-7)
        counts.append(max(1, min(200, int(TIME_LIMIT_S / repeat / once))))
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeat):
        for which, (run, count) in enumerate(zip(contenders, counts, strict=True)):
            run()  # the contender before it has filled the caches with other data
            start = clock()
            for _ in range(count):
                run()
            times[which].append((clock() - start) / count * 1e6)
    return [statistics.median(each) for each in times]


def read_all(case: Case) -> Callable[[], object]:
    caches = [cache.view(torch.float32) for cache in (case.key_cache, case.value_cache)]
    return lambda: [cache.sum() for cache in caches]


def product(dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    return lambda: a @ b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=["decode", "chunk"])
    parser.add_argument("--heads", type=int, help="only the shape with this many query heads")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends = [choose(name, "cpu").backend for name in ("cpu", "torch")]
    print(f"{options.threads} thread(s); {choose('cpu', 'cpu').reason}")
    columns = "us: cpu      torch       SDPA  torch/cpu SDPA/cpu  share of"
    print(f"{'heads':>10} {'dtype':>9} {'step':>22}  {columns}")
    steps = [("decode", batch, 1, context) for batch, context in DECODES]
    steps += [("chunk", 1, queries, context) for queries, context in CHUNKS]
    for heads in HEADS:
        if options.heads not in (None, heads[0]):
            continue
        for dtype in (torch.bfloat16, torch.float32):
            dtype_name = str(dtype).removeprefix("torch.")
            if options.dtype not in (None, dtype_name):
                continue
            for kind, batch, queries, context in steps:
                if options.only not in (None, kind):
                    continue
                case = make_case(heads, batch, queries, context, dtype)
                contenders = [paged(backend, case) for backend in backends]
                contenders.append(sdpa(case, queries, context))
                contenders.append(read_all(case) if kind == "decode" else product(dtype))
                with torch.inference_mode():
                    ours, theirs, dense, yardstick = medians_us(contenders, options.repeat)
                if kind == "decode":
                    num_bytes = 2 * case.key_cache.nbytes
                    share = f"{yardstick / ours:5.0%} of {num_bytes / yardstick / 1e3:.0f} GB/s"
                    label = f"{batch} x 1 over {context}"
                else:
                    pairs = queries * (context - queries) + queries * (queries + 1) / 2
                    flops = 4 * pairs * heads[0] * heads[2]
                    rate = 2 * PRODUCT_SIZE**3 / yardstick / 1e3
                    share = f"{flops / ours / 1e3 / rate:5.0%} of {rate:.0f} GFLOP/s"
                    label = f"{queries} over {context}"
                print(
                    f"{heads[0]:>3}/{heads[1]}x{heads[2]:<4} {dtype_name:>9} "
                    f"{kind + ' ' + label:>22} {ours:9.1f} {theirs:10.1f} {dense:10.1f} "
                    f"{theirs / ours:9.1f}x {dense / ours:7.1f}x {share}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
