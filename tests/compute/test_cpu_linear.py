"""The packed product is the product in fp64, rounded once, for every shape, dtype and level."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.kernels.cpu import linear as cpu_linear
from stepscope.kernels.cpu.library import LEVEL_VARIABLE, LEVELS
from stepscope.kernels.cpu.linear import (
    BF16_LEVELS,
    PAGE_BYTES,
    HugePages,
    PackedLinear,
    is_usable,
)
from stepscope.kernels.dispatch import linear as dispatch
from tests.support.cpu_levels import USABLE, highest_level, needs_level

KINDS = [
    pytest.param((dtype, level), marks=needs_level(level), id=f"{name}-{level}")
    for name, dtype, levels in (
        ("bf16", torch.bfloat16, BF16_LEVELS),
        ("fp32", torch.float32, LEVELS),
    )
    for level in levels
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=KINDS)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype of x, with the kernels of one level."""
    dtype, level = request.param
    with highest_level(level):
        yield dtype


def random_values(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random values that bf16 holds exactly, like the weights of checkpoints."""
    return torch.randn(*shape, generator=generator).bfloat16().to(dtype)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, size: int) -> None:
    """Half a unit in the last place of bf16 (2^-9), and what `size` sums in fp32 may be off."""
    assert got.shape == exact.shape
    last_place = 2.0**-8 if got.dtype is torch.bfloat16 else 0.0
    bound = exact.abs() * last_place + 1e-6 * size + 1e-38
    assert ((got.double() - exact).abs() <= bound).all()


shapes = st.tuples(
    st.integers(0, 40),  # rows: tiles of 1 to 12, or to 32, and several of them
    st.integers(1, 100),  # outputs: panels that are not full
    # Inputs, in pairs, or as many as a tile has.
    st.integers(1, 40).map(lambda half: 2 * half) | st.sampled_from([32, 64, 96]),
)


@settings(max_examples=40)
@given(
    shape=shapes, seed=st.integers(0, 1000), has_bias=st.booleans(), num_threads=st.integers(1, 2)
)
def test_packed_products_of_all_shapes_are_exact_up_to_one_rounding(
    dtype: torch.dtype, shape: tuple[int, int, int], seed: int, has_bias: bool, num_threads: int
) -> None:
    num_rows, num_outputs, size = shape
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, size, generator=generator).to(dtype)
    weight = random_values(generator, dtype, num_outputs, size)
    bias = random_values(generator, dtype, num_outputs) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_rounded_once(PackedLinear(weight, bias)(x), exact, size)


@settings(max_examples=25)
@given(shape=shapes, seed=st.integers(0, 1000), has_bias=st.booleans())
def test_a_gated_product_is_the_silu_of_one_half_times_the_other_half(
    dtype: torch.dtype, shape: tuple[int, int, int], seed: int, has_bias: bool
) -> None:
    num_rows, num_outputs, size = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, size, generator=generator).to(dtype)
    weight = random_values(generator, dtype, 2 * num_outputs, size)
    bias = random_values(generator, dtype, 2 * num_outputs) if has_bias else None
    both = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    got = PackedLinear(weight, bias, is_gated=True)(x)
    assert got.shape == (num_rows, num_outputs)
    exact = F.silu(gate) * up
    last_place = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
    bound = exact.abs() * last_place + 1e-5 * size * (1 + up.abs())
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("num_rows", [1, 2, 13, 200, 700])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    dtype: torch.dtype, num_rows: int
) -> None:
    # Large enough for both threads and, at 700 rows, for several blocks of rows.
    generator = torch.Generator().manual_seed(1)
    x = random_values(generator, dtype, 700, 1024)
    weight = random_values(generator, dtype, 500, 1024)
    linear = PackedLinear(weight, None)
    torch.set_num_threads(1)
    every = linear(x)
    torch.set_num_threads(2)
    some = linear(x[:num_rows])
    assert torch.equal(some, every[:num_rows])


def test_infinities_and_nan_pass_through_the_product(dtype: torch.dtype) -> None:
    weight = torch.eye(32).to(dtype)
    x = torch.ones(2, 32).to(dtype)
    x[0, 3] = float("nan")
    x[1] = float("inf")
    got = PackedLinear(weight, None)(x)
    assert got[0].isnan().all()
    assert got[1].isnan().all()  # infinity times the zeros of the identity
    assert PackedLinear(torch.ones(32, 32).to(dtype), None)(x)[1].isinf().all()


def test_packed_bf16_products_need_avx512_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 8).bfloat16()
    assert is_usable(weight) == (BF16_LEVELS[0] in USABLE)
    assert not is_usable(torch.zeros(8, 7).bfloat16())
    assert not is_usable(torch.zeros(8, 8, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(cpu_linear, "default_library", lambda: None)
    assert not is_usable(weight)


@needs_level(BF16_LEVELS[0])
@pytest.mark.parametrize(
    ("times", "layout"), [((2.0, 1.0), "packed"), ((1.0, 2.0), "oneDNN-packed")]
)
def test_with_amx_bf16_has_the_layout_that_is_faster_in_a_trial(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], layout: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    calls = itertools.cycle(times)  # oneDNN is first in each round
    monkeypatch.setattr(dispatch, "_cpu_ms", lambda run, num_products: (run(), next(calls))[1])
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    dispatch._tiles_beat_onednn.cache_clear()
    before = torch.get_num_threads()
    try:
        weight = torch.randn(8, 32).bfloat16()
        x = torch.randn(3, 32).bfloat16()
        product = dispatch.Linear(weight)
        assert product.layout == layout
        assert_rounded_once(product(x), x.double() @ weight.double().T, 32)
        assert dispatch.Linear(weight.float()).layout == "packed"
        assert torch.get_num_threads() == before
        # Without tiles for it, oneDNN is the faster one; with a level asked for, ours are used.
        assert dispatch.Linear(torch.randn(8, 30).bfloat16()).layout == "oneDNN-packed"
        monkeypatch.setenv(LEVEL_VARIABLE, BF16_LEVELS[0])
        assert dispatch.Linear(weight).layout == "packed"
    finally:
        dispatch._tiles_beat_onednn.cache_clear()


@needs_level("baseline")
def test_fp32_weights_are_packed_only_if_bf16_holds_all_of_them() -> None:
    weight = torch.randn(8, 7, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    assert is_usable(weight)
    assert PackedLinear(weight, None).num_bytes == 2 * 8 * 7
    weight[7, 6] = 1 + 2.0**-8
    assert not is_usable(weight)
    assert not is_usable(weight.half())
    assert not is_usable(torch.zeros(8, 8, device="meta"))


def test_weights_in_huge_pages_give_the_same_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = random_values(generator, dtype, 5, 256)
    weights = [random_values(generator, dtype, 1024, 256) for _ in range(5)]
    expected = [PackedLinear(weight, None)(x) for weight in weights]
    memory = HugePages(2 * PAGE_BYTES)  # room for all but the last
    for weight, product in zip(weights, expected, strict=True):
        assert torch.equal(PackedLinear(weight, None, memory)(x), product)


def test_tensors_in_huge_pages_do_not_overlap_and_begin_at_cache_lines() -> None:
    memory = HugePages(PAGE_BYTES)
    pieces = [memory.copy(torch.full((n,), float(n))) for n in (1, 17, 300)]
    for piece, n in zip(pieces, (1, 17, 300), strict=True):
        assert torch.equal(piece, torch.full((n,), float(n)))
        assert piece.data_ptr() % 64 == 0
    whole = memory.copy(torch.zeros(PAGE_BYTES // 4))  # no room left: from elsewhere
    assert torch.equal(whole, torch.zeros(PAGE_BYTES // 4))
    assert torch.equal(pieces[2], torch.full((300,), 300.0))
