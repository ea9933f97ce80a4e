"""(e) Kernels alone: attention by every available backend, and the operations between products.

Backends read paged keys and values, as in a step. For comparison, other kernels read dense or
packed keys and values, with nothing to gather. Results are given as shares of the least possible
time: the time for the bytes to read or for the operations to compute, whichever is longer. Calls
rotate over copies of their tensors that together are several times as large as the L2 cache.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.engine.bench.gpu.costs import attention_flops, causal_pairs
from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.bench.gpu.measure.timing import Run
from stepscope.engine.bench.gpu.results import Facts
from stepscope.kernels.dispatch import fused
from stepscope.kernels.dispatch.backends import available_backends, choose
from stepscope.kernels.paged_attention import PagedBatch
from stepscope.kernels.plain import flash_attention

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
FUSED_TOKENS = (1, 64, 256, 2048)
HIDDEN, INNER = 4096, 14336  # sizes for the fused operations, from Llama-3.1-8B

Lengths = tuple[tuple[int, int], ...]


class Case(NamedTuple):
    """One step's attention to measure, with its least bytes and operations.

    `lengths` has, for each request, its tokens before the step and its tokens in the step.
    """

    name: str
    heads: tuple[int, int, int]  # query heads, KV heads, head dimension
    lengths: Lengths
    dtype: torch.dtype

    @property
    def is_decode(self) -> bool:
        return all(count == 1 for _, count in self.lengths)

    @property
    def is_dense(self) -> bool:
        """Whether a dense kernel can run the requests.

        All must have the same lengths, and each must be a decode or a whole prompt.
        """
        return len(set(self.lengths)) == 1 and (self.is_decode or self.lengths[0][0] == 0)

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, dim = self.heads
        tokens = sum(before + count for before, count in self.lengths)
        return tokens * 2 * kv_heads * dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        pairs = sum(causal_pairs(before, count) for before, count in self.lengths)
        return attention_flops(pairs, self.heads[0], self.heads[2])


def measure(bench: Bench) -> None:
    dtype = torch.bfloat16
    bench.setting(dtype="bfloat16", block_size=BLOCK_SIZE, rotation=bench.sizes.rotation_bytes)
    for each in available_backends(str(bench.device), dtype):
        if not each.usable and not each.reason.startswith("runs on "):
            bench.missing(each.name, each.reason, contender=each.name)
    for place, heads in enumerate(bench.sizes.kernel_heads):
        for case in _cases(heads, bench.sizes.kernel_shrink, dtype, is_first=place == 0):
            _measure_case(bench, case)
        if place == 0:
            for num_tokens in FUSED_TOKENS if bench.sizes.kernel_shrink == 1 else (3,):
                _measure_fused(bench, num_tokens, dtype)


def _cases(
    heads: tuple[int, int, int], shrink: int, dtype: torch.dtype, *, is_first: bool
) -> Iterator[Case]:
    """Yield the cases of one shape of heads.

    Args:
        is_first: whether to add decodes over short contexts, which only the first shape has.
    """
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
        yield Case(f"{heads[0]} heads: {name}", heads, lengths, dtype)


def _measure_case(bench: Bench, case: Case) -> None:
    num_copies = max(1, min(MOST_COPIES, bench.sizes.rotation_bytes // case.kv_bytes))
    facts: Facts = {
        "case": case.name,
        "floor_bytes": case.kv_bytes,
        "floor_flops": case.flops,
    }
    for each in available_backends(str(bench.device), case.dtype):
        if not each.usable or each.name == "reference":
            continue
        with bench.attempt(f"{case.name}, {each.name}", contender=each.name, **facts):
            backend = choose(each.name, str(bench.device), case.dtype).backend
            samples = bench.stopwatch.milliseconds(
                _paged(bench, case, backend, num_copies),
                can_capture=backend.is_capturable,
            )
            bench.found(f"{case.name}, {each.name}", samples, contender=each.name, **facts)
    for contender, make in _others(bench, case):
        with bench.attempt(f"{case.name}, {contender}", contender=contender, **facts):
            samples = bench.stopwatch.milliseconds(make(num_copies), can_capture=True)
            bench.found(f"{case.name}, {contender}", samples, contender=contender, **facts)


def _paged(bench: Bench, case: Case, backend: Callable[..., object], copies: int) -> list[Run]:
    num_heads, num_kv_heads, head_dim = case.heads
    contexts = np.array([before + count for before, count in case.lengths])
    counts = np.array([count for _, count in case.lengths])
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    num_blocks = len(case.lengths) * width
    query = _random(bench, case.dtype, int(counts.sum()), num_heads, head_dim)
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(len(case.lengths), width)
    batch = PagedBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=contexts,
        block_tables=tables,
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=bench.device),
        block_size=BLOCK_SIZE,
        device=bench.device,
    )
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [_random(bench, case.dtype, 2, *shape) for _ in range(copies)]
    attend = partial(backend, query, batch=batch, scale=head_dim**-0.5)
    return [partial(attend, key_cache=keys, value_cache=values) for keys, values in caches]


def _others(bench: Bench, case: Case) -> Iterator[tuple[str, Callable[[int], Sequence[Run]]]]:
    """Yield the kernels that read contiguous keys and values, each with its name."""
    if case.is_dense:
        yield "SDPA, dense", partial(_sdpa, bench, case)
    if case.is_decode or not bench.is_gpu:
        return
    for name, load in (
        ("flash-attn, packed", flash_attention.load_flash_attn),
        ("torch varlen, packed", flash_attention.load_torch_varlen),
    ):
        try:
            varlen = load()
        except ImportError:
            continue  # its backend has already reported that it is missing
        yield name, partial(_packed, bench, case, varlen)


def _sdpa(bench: Bench, case: Case, copies: int) -> list[Run]:
    num_heads, num_kv_heads, head_dim = case.heads
    before, count = case.lengths[0]
    batch = len(case.lengths)
    query = _random(bench, case.dtype, batch, num_heads, count, head_dim)
    shape = (batch, num_kv_heads, before + count, head_dim)
    dense = [_random(bench, case.dtype, 2, *shape) for _ in range(copies)]
    attend = partial(F.scaled_dot_product_attention, is_causal=not case.is_decode, enable_gqa=True)
    return [partial(attend, query, keys, values) for keys, values in dense]


def _packed(bench: Bench, case: Case, varlen: flash_attention.Varlen, copies: int) -> list[Run]:
    num_heads, num_kv_heads, head_dim = case.heads
    counts = [count for _, count in case.lengths]
    contexts = [before + count for before, count in case.lengths]
    query = _random(bench, case.dtype, sum(counts), num_heads, head_dim)
    query_starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=bench.device)
        for each in (counts, contexts)
    )
    packed = [
        _random(bench, case.dtype, 2, sum(contexts), num_kv_heads, head_dim) for _ in range(copies)
    ]

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return varlen.attend(
            query,
            keys,
            values,
            query_starts,
            key_starts,
            max(counts),
            max(contexts),
            head_dim**-0.5,
            None,
            None,
        )

    return [partial(attend, keys, values) for keys, values in packed]


class FusedOperation(NamedTuple):
    """One call of a fused operation on tensors of its own, by our kernels and by plain torch."""

    moved_bytes: int
    ours: Run
    plain: Run


def _measure_fused(bench: Bench, num_tokens: int, dtype: torch.dtype) -> None:
    """Measure fused kernels between the matrix products of a layer, and the same in plain torch."""
    random = partial(_random, bench, dtype)
    for name, make in (
        ("add + RMSNorm", partial(_add_rms_norm, random, num_tokens)),
        ("q/k norm, RoPE, store", partial(_norm_rope_store, bench, random, num_tokens)),
        ("SiLU * mul", partial(_silu_mul, random, num_tokens)),
    ):
        calls = [make()]
        moved = calls[0].moved_bytes
        num_copies = max(1, min(MOST_COPIES, bench.sizes.rotation_bytes // moved))
        calls += [make() for _ in range(num_copies - 1)]
        case = f"{name}, {num_tokens} tokens"
        for contender, runs in (
            ("ours", [call.ours for call in calls]),
            ("plain torch", [call.plain for call in calls]),
        ):
            facts: Facts = {"case": case, "contender": contender, "floor_bytes": moved}
            with bench.attempt(f"{case}, {contender}", **facts):
                samples = bench.stopwatch.milliseconds(runs, can_capture=True)
                bench.found(f"{case}, {contender}", samples, **facts)


def _add_rms_norm(random: Callable[..., torch.Tensor], num_tokens: int) -> FusedOperation:
    x, residual, weight = random(num_tokens, HIDDEN), random(num_tokens, HIDDEN), random(HIDDEN)
    arguments = (x, residual, weight, 1e-6)
    return FusedOperation(
        4 * x.nbytes,
        partial(fused.add_rms_norm, *arguments),
        partial(fused.torch_add_rms_norm, *arguments),
    )


def _norm_rope_store(
    bench: Bench, random: Callable[..., torch.Tensor], num_tokens: int
) -> FusedOperation:
    heads, kv_heads, head_dim = 32, 8, 128
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim)
    rope = torch.randn(num_tokens, head_dim, device=bench.device)
    positions = torch.arange(num_tokens, device=bench.device)
    cache = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, kv_heads, head_dim)
    arguments = (
        *(qkv, rope, positions, positions, random(*cache), random(*cache), heads, kv_heads),
        *(random(head_dim), random(head_dim), 1e-6),
    )
    return FusedOperation(
        2 * qkv.nbytes + rope.nbytes,
        partial(fused.norm_rope_store, *arguments),
        partial(fused.torch_norm_rope_store, *arguments),
    )


def _silu_mul(random: Callable[..., torch.Tensor], num_tokens: int) -> FusedOperation:
    gate_up = random(num_tokens, 2 * INNER)
    return FusedOperation(
        3 * gate_up.nbytes // 2,
        partial(fused.silu_mul, gate_up),
        partial(fused.torch_silu_mul, gate_up),
    )


def _random(bench: Bench, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=bench.device, dtype=dtype)
