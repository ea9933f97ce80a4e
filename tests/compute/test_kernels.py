"""Every attention backend equals the reference, and the choice of a backend is explained."""

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.kernels import torch_attention
from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.cpu.attention import CpuAttention
from stepscope.kernels.dispatch.backends import BackendUnavailableError, available_backends, choose
from stepscope.kernels.paged_attention import (
    AttentionBackend,
    AttentionOptions,
    LayerCache,
    PagedBatch,
    as_bytes,
)
from stepscope.kernels.reference import ReferenceAttention
from tests.support.cpu_levels import EACH_LEVEL, USABLE, needs_level

# Every backend but the oracle; that in C++ once for each level of instructions that runs here.
BACKENDS = [
    pytest.param(f"cpu-{level}", marks=needs_level(level)) for level in cpu_library.LEVELS
] + [
    pytest.param(b.name)
    for b in available_backends("cpu")
    if b.usable and b.name not in ("cpu", "reference")
]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def assert_exact(backend: AttentionBackend, case: "Case", options: AttentionOptions) -> None:
    assert_near(backend(*case, options), ReferenceAttention()(*case, options))


def create(name: str) -> AttentionBackend:
    if name.startswith("cpu-"):
        return CpuAttention(cpu_library.load(name.removeprefix("cpu-")))
    return choose(name, "cpu").backend


class Case(NamedTuple):
    """A step over a cache full of random keys and values."""

    query: torch.Tensor
    cache: LayerCache
    batch: PagedBatch

    def to(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> "Case":
        cache = (each.to(cache_dtype or dtype) for each in self.cache[:2])
        return self._replace(query=self.query.to(dtype), cache=LayerCache(*cache))


def make_case(
    lengths: list[tuple[int, int]],
    *,
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """`lengths` is (tokens before the step, tokens in it) for each request."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(before + new) // block_size) for before, new in lengths]
    num_blocks = sum(needed) + 3
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    tables = np.zeros((len(lengths), max(needed) + 1), dtype=np.int64)
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    counts = np.array([new for _, new in lengths])
    cache = (2, num_blocks, block_size, num_kv_heads, head_dim)
    return Case(
        torch.randn(int(counts.sum()), num_heads, head_dim, generator=generator).to(device),
        LayerCache(*torch.randn(cache, generator=generator).to(device)),
        PagedBatch(
            query_starts=np.concatenate([[0], np.cumsum(counts)]),
            context_lens=np.array([before + new for before, new in lengths]),
            block_tables=tables,
            slot_mapping=torch.zeros(int(counts.sum()), dtype=torch.int64),
            block_size=block_size,
            device=torch.device(device),
        ),
    )


DECODES = [(n, 1) for n in (0, 3, 4, 30, 31, 32, 7, 90)]
CHUNKS = [(0, 1), (0, 2), (0, 40), (5, 7), (64, 16), (33, 150), (1, 130)]
MIXED = [(50, 1), (0, 33), (17, 1), (90, 5), (3, 1), (2, 2)]


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (1, None, False), (9, None, False), (64, 2.0, False), (9, 3.0, True)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_equals_the_reference(
    backend: str,
    lengths: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    case = make_case(lengths)
    sinks = torch.linspace(-2, 3, 4) if with_sinks else None
    options = AttentionOptions(0.7, window, softcap, sinks)
    expected = ReferenceAttention()(*case, options)
    chosen = create(backend)
    for _ in range(2):  # as in two layers: the second uses the first one's plan
        assert_near(chosen(*case, options), expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (6, 1), (8, 4)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_supports_any_head_groups_and_block_sizes(
    backend: str, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    case = make_case(
        MIXED, block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16
    )
    assert_exact(create(backend), case, AttentionOptions(0.25))


@pytest.mark.parametrize("backend", BACKENDS)
def test_decodes_of_very_different_lengths_are_grouped_and_still_exact(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "GATHER_ELEMENTS", {"cpu": 600})
    rng = random.Random(3)
    lengths = [(rng.choice([1, 20, 300]) + rng.randrange(9), 1) for _ in range(40)]
    case = make_case(lengths)
    assert_exact(create(backend), case, AttentionOptions(0.35))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_stays_close_to_the_reference(backend: str, cache_dtype: torch.dtype) -> None:
    case = make_case(MIXED, head_dim=64)
    half = case.to(torch.bfloat16, cache_dtype)
    expected = ReferenceAttention()(*half, AttentionOptions(0.125))
    actual = create(backend)(*half, AttentionOptions(0.125))
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_one_backend_instance_serves_changing_contexts_and_windows(backend: str) -> None:
    chosen = create(backend)
    for before, window in [(3, None), (2000, None), (700, 5), (1500, 900), (10, 5)]:
        case = make_case([(before, 140), (before, 1)])
        options = AttentionOptions(0.3, window)
        assert_exact(chosen, case, options)


class Shape(NamedTuple):
    lengths: list[tuple[int, int]]
    block_size: int
    group: int
    num_kv_heads: int
    head_dim: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Steps of any kind, contexts at and around the bounds of blocks, tiles and partitions."""
    block_size = draw(st.sampled_from([1, 4, 16, 32]))
    around = st.builds(
        lambda bound, off: max(0, bound + off),
        st.sampled_from([0, block_size, 64, 128, 512, 1024, 3 * block_size]),
        st.integers(-1, 1),
    )
    new = st.one_of(st.just(1), st.integers(1, 5), st.sampled_from([63, 64, 65, 200]))
    return Shape(
        draw(st.lists(st.tuples(around, new), min_size=1, max_size=5)),
        block_size,
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 7, 16, 33, 64, 80, 96, 128, 256])),
    )


@pytest.mark.slow
@EACH_LEVEL
@settings(max_examples=25)
@given(
    shape=shapes(),
    window=st.sampled_from([None, 1, 30, 64, 600]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    with_sinks=st.booleans(),
)
def test_cpp_equals_the_reference_whatever_the_shape(
    level: str, shape: Shape, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    num_heads = shape.group * shape.num_kv_heads
    case = make_case(
        shape.lengths,
        block_size=shape.block_size,
        num_heads=num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    sinks = torch.linspace(-2, 3, num_heads) if with_sinks else None
    options = AttentionOptions(shape.head_dim**-0.5, window, softcap, sinks)
    chosen = create(f"cpu-{level}")
    assert_exact(chosen, case, options)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        smaller = case.to(torch.float32, dtype)
        assert_exact(chosen, smaller, options)
    # Of the same rounded inputs the exact result: what bf16 adds is the rounding of weights and of
    # the result, 2^-9 of the largest value each.
    half = case.to(torch.bfloat16)
    exact = ReferenceAttention()(*half.to(torch.float32), options)
    error = (chosen(*half, options).float() - exact).abs()
    assert float(error.max()) <= 2**-8 * float(half.cache.values.abs().max())


@EACH_LEVEL
def test_every_fp8_number_is_read_as_torch_reads_it(level: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    value_cache = codes.view(torch.float8_e4m3fn).view(1, 1, 1, -1)
    case = make_case([(0, 1)], block_size=1, num_heads=1, num_kv_heads=1, head_dim=len(codes))
    case.batch.block_tables[:] = 0
    # One key: the output is its value, to the bit.
    cache = LayerCache(torch.zeros_like(value_cache), value_cache)
    output = create(f"cpu-{level}")(case.query, cache, case.batch, AttentionOptions(1))
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(output.flatten(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_LEVEL
def test_cpp_gives_a_request_the_same_bits_in_any_batch_and_with_any_threads(
    level: str, dtype: torch.dtype
) -> None:
    lengths = [(1500, 1), (0, 150), (700, 1), (300, 130), (3, 1), (64, 2)]
    case = make_case(lengths, num_heads=6, head_dim=64).to(dtype)
    chosen = create(f"cpu-{level}")
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(chosen(*case, AttentionOptions(0.125)))
    torch.set_num_threads(before)
    assert torch.equal(*results)
    starts = case.batch.query_starts
    for r in range(len(lengths)):
        starts_alone = np.array([0, lengths[r][1]])
        lens, tables = case.batch.context_lens[r : r + 1], case.batch.block_tables[r : r + 1]
        alone = replace(
            case.batch, query_starts=starts_alone, context_lens=lens, block_tables=tables, plans={}
        )
        query = case.query[starts[r] : starts[r + 1]]
        actual = chosen(query, case.cache, alone, AttentionOptions(0.125))
        assert torch.equal(actual, results[0][starts[r] : starts[r + 1]])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 2.0}])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_slots_without_a_token_of_the_request_hold_changes_nothing(
    backend: str, cache_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """A request without finite logits leaves NaN in the slots that others get."""
    dtype = torch.float32 if cache_dtype is torch.float32 else torch.bfloat16
    case = make_case(MIXED + DECODES, block_size=16, head_dim=40).to(dtype, cache_dtype)
    chosen = create(backend)
    expected = chosen(*case, AttentionOptions(0.3, **options))
    used = torch.zeros(case.cache.keys.shape[:2], dtype=torch.bool)
    for table, length in zip(case.batch.block_tables, case.batch.context_lens, strict=True):
        for position in range(length):
            used[table[position // 16], position % 16] = True
    nothing = torch.tensor(math.nan).to(cache_dtype)
    for each in case.cache[:2]:
        as_bytes(each)[~used] = as_bytes(nothing)
    assert torch.equal(chosen(*case, AttentionOptions(0.3, **options)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_LEVEL
def test_cpp_ignores_what_earlier_calls_left_in_its_memory(level: str, dtype: torch.dtype) -> None:
    chosen = create(f"cpu-{level}")
    case = make_case(MIXED + CHUNKS, head_dim=40).to(dtype)
    expected = chosen(*case, AttentionOptions(0.3))
    other = make_case([(0, 300)], head_dim=128).to(dtype)
    nothing = LayerCache(*(torch.full_like(each, math.nan) for each in other.cache[:2]))
    assert chosen(other.query, nothing, other.batch, AttentionOptions(0.3)).isnan().all()
    assert torch.equal(chosen(*case, AttentionOptions(0.3)), expected)


@EACH_LEVEL
def test_cpp_accepts_steps_without_requests_and_requests_without_queries(level: str) -> None:
    chosen = create(f"cpu-{level}")
    case, alone = (make_case([(20, 1), (9, 0), (3, 4)]) for _ in range(2))
    torch.testing.assert_close(
        chosen(*case, AttentionOptions(0.3)), ReferenceAttention()(*alone, AttentionOptions(0.3))
    )
    starts, none, tables = (np.zeros(size, dtype=np.int64) for size in (1, 0, (0, 0)))
    nothing = replace(
        case.batch, query_starts=starts, context_lens=none, block_tables=tables, plans={}
    )
    found = chosen(case.query[:0], case.cache, nothing, AttentionOptions(1))
    assert found.shape == (0, 4, 8)


@EACH_LEVEL
def test_cpp_accepts_queries_in_any_layout_and_refuses_what_it_cannot_read(level: str) -> None:
    chosen = create(f"cpu-{level}")
    case = make_case(MIXED)
    expected = chosen(*case, AttentionOptions(0.3))
    by_head = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(chosen(by_head, *case[1:], AttentionOptions(0.3)), expected)
    with pytest.raises(TypeError, match="no kernel for queries of"):
        chosen(case.query.bfloat16(), *case[1:], AttentionOptions(0.3))
    case.batch.block_tables[0, 0] = len(case.cache.keys)
    case.batch.plans.clear()
    with pytest.raises(IndexError, match="a block that is not in the KV cache"):
        chosen(*case, AttentionOptions(0.3))


@needs_level("baseline")
@pytest.mark.parametrize("counts", [(1, 0, 1), (1, 2, 1)], ids=["no queries", "two queries"])
def test_cpp_refuses_a_decode_without_exactly_one_query(counts: tuple[int, ...]) -> None:
    # It reads a decode's query unchecked: without one it would read foreign memory.
    case = make_case([(8, count) for count in counts])
    case.batch.decodes = np.ones(3, dtype=np.int64)
    with pytest.raises(ValueError, match="marked as a decode, and a decode has one query"):
        create("cpu-baseline")(*case, AttentionOptions(1.0))
    case.batch.decodes = np.array([1, 0, 1])
    assert_exact(create("cpu-baseline"), case, AttentionOptions(1.0))


def test_the_reference_is_causal_softmax_attention() -> None:
    case = make_case([(0, 21)], block_size=7, num_heads=2, num_kv_heads=2)
    table = case.batch.block_tables[0, :3]
    query, keys, values = (
        t.transpose(0, 1)
        for t in (
            case.query,
            case.cache.keys[table].flatten(0, 1),
            case.cache.values[table].flatten(0, 1),
        )
    )
    expected = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.4)
    torch.testing.assert_close(
        ReferenceAttention()(*case, AttentionOptions(0.4)), expected.transpose(0, 1)
    )


@needs_level("baseline")
def test_auto_chooses_the_first_usable_backend_and_says_why() -> None:
    first = next(b for b in available_backends("cpu") if b.usable)
    choice = choose("auto", "cpu")
    assert choice.backend.name == first.name == "cpu"
    assert choice.reason == first.reason
    assert USABLE[-1] in choice.reason
    assert "cpu" in choice.reason


def test_every_backend_has_the_name_under_which_it_is_listed() -> None:
    for listed in available_backends("cpu"):
        if listed.usable:
            backend: AttentionBackend = choose(listed.name, "cpu").backend
            assert backend.name == listed.name


@pytest.mark.parametrize("name", ["flash-attn", "triton"])
def test_a_gpu_backend_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'{name}' cannot run .* not on cpu"):
        choose(name, "cpu")
