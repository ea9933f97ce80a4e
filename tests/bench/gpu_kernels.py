"""(a) the device's ceilings, and (e) attention alone.

Other parts give their results as shares of the ceilings, which are measured in the same run. The
copy counts bytes read and bytes written.

Backends of attention read paged keys and values, as in a step; torch's SDPA reads dense ones, with
nothing to gather. Calls rotate over copies of their tensors that together are several
times as large as the L2 cache.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from gpu_bench import Bench, Run
from gpu_engine import attention_flops, causal_pairs

from stepscope.engine.execution.devices import free_bytes
from stepscope.kernels.dispatch.backends import available_backends, choose
from stepscope.kernels.paged_attention import AttentionOptions, LayerCache, PagedBatch

BLOCK_SIZE = 16
DECODES = tuple((batch, context) for context in (512, 4096) for batch in (1, 8, 32, 128, 256))
# (tokens before the step, tokens in the step) of each request.
CHUNKS = (
    ((0, 512),),
    ((0, 2048),),
    ((0, 8192),),
    ((14336, 2048),),
    ((0, 300), (100, 500), (3000, 1200)),
)
MIXED = (*((4096, 1),) * 64, (2048, 1984))
MOST_COPIES = 128
DTYPE = torch.bfloat16

Lengths = tuple[tuple[int, int], ...]
Make = Callable[[int], list[Run]]  # makes runs on so many copies of the tensors


def measure_ceilings(bench: Bench, _: None) -> None:
    with bench.attempt("copy"):
        # At most a quarter of the free memory, so that small GPUs can be measured too.
        size = min(bench.sizes.copy_bytes, free_bytes(bench.device) // 4)
        source = torch.randint(0, 100, (size,), dtype=torch.int8, device=bench.device)
        target = torch.empty_like(source)
        samples = bench.milliseconds([lambda: target.copy_(source)], can_capture=False)
        bench.found("copy", samples, bytes=2 * size)
    with bench.attempt("gemm"):
        side = bench.sizes.product_side
        a, b = torch.randn(2, side, side, device=bench.device).to(DTYPE)
        out = torch.empty_like(a)
        samples = bench.milliseconds([lambda: torch.mm(a, b, out=out)] * 4, can_capture=False)
        bench.found("gemm", samples, flops=2 * side**3, side=side, dtype="bfloat16")


class Case(NamedTuple):
    """One step's attention. `lengths`: of each request its tokens before, and in the step."""

    name: str
    heads: tuple[int, int, int]  # query heads, KV heads, head dimension
    lengths: Lengths

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.lengths]

    @property
    def contexts(self) -> list[int]:
        return [before + count for before, count in self.lengths]

    @property
    def is_decode(self) -> bool:
        return set(self.counts) == {1}

    @property
    def floors(self) -> dict[str, int]:
        num_heads, kv_heads, dim = self.heads
        pairs = sum(causal_pairs(before, count) for before, count in self.lengths)
        return {
            "floor_bytes": sum(self.contexts) * 2 * kv_heads * dim * DTYPE.itemsize,
            "floor_flops": attention_flops(pairs, num_heads, dim),
        }


def measure_kernels(bench: Bench, _: None) -> None:
    sizes = bench.sizes
    bench.setting(dtype="bfloat16", block_size=BLOCK_SIZE, rotation=sizes.rotation_bytes)
    backends = available_backends(str(bench.device), DTYPE)
    for each in backends:
        if not each.usable and not each.reason.startswith("runs on "):
            bench.missing(each.name, each.reason, contender=each.name)
    usable = [each.name for each in backends if each.usable and each.name != "reference"]
    for place, heads in enumerate(sizes.kernel_heads):
        for case in _cases(heads, sizes.kernel_shrink, is_first=place == 0):
            for name in usable:
                backend = choose(name, str(bench.device), DTYPE).backend
                make = partial(_paged, bench, case, backend)
                _measure(bench, case, name, make, can_capture=backend.is_capturable)
            # A dense kernel needs requests alike: decodes, or whole prompts.
            if len(set(case.lengths)) == 1 and (case.is_decode or case.lengths[0][0] == 0):
                _measure(bench, case, "SDPA, dense", partial(_sdpa, bench, case), can_capture=True)


def _measure(bench: Bench, case: Case, contender: str, make: Make, *, can_capture: bool) -> None:
    facts = {"case": case.name, "contender": contender, **case.floors}
    what = f"{case.name}, {contender}"
    with bench.attempt(what, **facts):
        runs = make(_num_copies(bench, case.floors["floor_bytes"]))
        bench.found(what, bench.milliseconds(runs, can_capture=can_capture), **facts)


def _num_copies(bench: Bench, num_bytes: int) -> int:
    return max(1, min(MOST_COPIES, bench.sizes.rotation_bytes // num_bytes))


def _cases(heads: tuple[int, int, int], shrink: int, *, is_first: bool) -> Iterator[Case]:
    """Yield the cases of a shape of heads; decodes over short contexts of the first shape only."""
    all_lengths: dict[str, Lengths] = {}  # a dict, because shrinking makes some cases the same
    for batch, context in DECODES:
        if is_first or context == DECODES[-1][1]:
            batch, context = max(1, batch // shrink), max(1, context // shrink)
            all_lengths[f"decode, {batch} x {context}"] = ((context - 1, 1),) * batch
    for chunks in CHUNKS:
        lengths = tuple((before // shrink, max(2, count // shrink)) for before, count in chunks)
        what = ", ".join(f"{count} after {before}" for before, count in lengths)
        all_lengths[f"chunk, {what}"] = lengths
    lengths = tuple((b // shrink, n if n == 1 else max(2, n // shrink)) for b, n in MIXED)
    (context, _), (before, count) = lengths[0], lengths[-1]
    all_lengths[f"{len(lengths) - 1} decodes of {context}, {count} after {before}"] = lengths
    for name, lengths in all_lengths.items():
        yield Case(f"{heads[0]} heads: {name}", heads, lengths)


def _paged(bench: Bench, case: Case, backend: Any, copies: int) -> list[Run]:
    num_heads, num_kv_heads, head_dim = case.heads
    counts, contexts = np.array(case.counts), np.array(case.contexts)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    num_blocks = len(counts) * width
    query = _random(bench, int(counts.sum()), num_heads, head_dim)
    batch = PagedBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=contexts,
        block_tables=np.random.default_rng(0).permutation(num_blocks).reshape(-1, width),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=bench.device),
        block_size=BLOCK_SIZE,
        device=bench.device,
    )
    shape = (2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [LayerCache(*_random(bench, *shape)) for _ in range(copies)]
    options = AttentionOptions(head_dim**-0.5)
    return [partial(backend, query, cache, batch, options) for cache in caches]


def _sdpa(bench: Bench, case: Case, copies: int) -> list[Run]:
    num_heads, num_kv_heads, head_dim = case.heads
    batch = len(case.lengths)
    query = _random(bench, batch, num_heads, case.counts[0], head_dim)
    shape = (2, batch, num_kv_heads, case.contexts[0], head_dim)
    dense = [_random(bench, *shape) for _ in range(copies)]
    attend = partial(F.scaled_dot_product_attention, is_causal=not case.is_decode, enable_gqa=True)
    return [partial(attend, query, keys, values) for keys, values in dense]


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=bench.device, dtype=DTYPE)
