"""The C++ library: which level is chosen, what is said without one, and its fused operations.

Each operation is compared with plain torch at every instruction level that runs here.
"""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.dispatch import fused
from stepscope.kernels.dispatch.backends import choose
from stepscope.kernels.paged_attention import FP8, KVScales, LayerCache, QKVHeads, scales_of, to_fp8
from tests.support.cpu_levels import EACH_LEVEL, USABLE, highest_level, needs_level

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def at_level(level: str) -> Iterator[str]:
    with highest_level(level):
        yield level


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


# ---- which library ----


@needs_level("baseline")
def test_the_highest_usable_instruction_level_is_chosen_and_any_lower_can_be_set() -> None:
    assert cpu_library.load().level == USABLE[-1]
    assert [cpu_library.load(level).level for level in USABLE] == USABLE
    with pytest.raises(cpu_library.LibraryMissingError, match=r"no warp kernels.*baseline"):
        cpu_library.load("warp")


@EACH_LEVEL
def test_an_environment_variable_caps_the_instruction_level(level: str) -> None:
    with highest_level(level):
        assert cpu_library.usable_levels()[-1] == level
        assert cpu_library.default_library().level == level
        assert level in choose("cpu", "cpu").reason
    with (
        highest_level("warp"),
        pytest.raises(cpu_library.LibraryMissingError, match=r"one of none, baseline.*not 'warp'"),
    ):
        cpu_library.load()


@pytest.mark.slow
@needs_level("baseline")
def test_the_cpu_library_shares_the_openmp_runtime_of_torch() -> None:
    # Two runtimes in a process would be two thread pools that compete for the cores.
    code = (
        "from stepscope.kernels.cpu import library as cpu_library\n"
        "from stepscope.kernels.dispatch import fused\n"
        "import torch\n"
        "for level in cpu_library.usable_levels(): cpu_library.load(level)\n"
        "torch.set_num_threads(2)\n"
        "fused.silu_mul(torch.ones(512, 4096)), torch.ones(512, 512) @ torch.ones(512, 512)\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})\n"
        "print(any('/kernels/cpu/_' in line for line in open('/proc/self/maps')))\n"
    )
    runtimes, loaded = run_python(code).splitlines()
    assert runtimes.count("omp") == 1, runtimes
    assert loaded == "True"


@pytest.mark.slow
def test_the_cpu_library_can_be_turned_off_and_the_backend_choice_says_so() -> None:
    code = (
        "from stepscope.kernels.cpu import library as cpu_library\n"
        "from stepscope.kernels.dispatch import backends, fused\n"
        "import torch\n"
        "choice = backends.choose()\n"
        "print(choice.backend.name, '|', choice.reason)\n"
        "print(cpu_library.default_library(), fused.silu_mul(torch.ones(1, 2)).shape)\n"
    )
    chosen, used = run_python(code, STEPSCOPE_CPU_LEVEL="none").splitlines()
    assert chosen.startswith("torch |")
    assert "cpu: turned off by STEPSCOPE_CPU_LEVEL=none" in chosen
    assert used == "None torch.Size([1, 1])"


def test_without_a_built_library_the_backend_choice_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_library, "_file", lambda level: None)
    choice = choose("auto", "cpu")
    assert choice.backend.name == "torch"
    assert "install g++" in choice.reason
    with pytest.raises(ValueError, match=r"'cpu' cannot run here .*were not built"):
        choose("cpu", "cpu")


@needs_level("baseline")
def test_a_library_built_from_other_sources_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a checkout the sources may be newer than the library built from them.
    monkeypatch.setattr(cpu_library, "INTERFACE", 0xBAD)
    with pytest.raises(cpu_library.LibraryMissingError, match="from older sources: install"):
        cpu_library.load()


def run_python(code: str, **environment: str) -> str:
    command, env = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the fused operations ----

ROWS, SIZES = st.integers(0, 9), st.integers(1, 300)


@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_numbers_are_rounded_to_fp8_as_torch_does(level: str) -> None:
    every = torch.arange(128, dtype=torch.uint8)[:-1].view(FP8).float()
    between = (every[1:] + every[:-1]) / 2
    sizes = torch.cat(
        [
            *(every, between, between.nextafter(every[1:]), between.nextafter(every[:-1])),
            torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, math.inf, 1e-30, 2.0**-10, math.nan]),
        ]
    )
    numbers = torch.cat([sizes, -sizes])
    numbers = F.pad(numbers, (0, len(numbers) % 2))
    one = torch.ones(1)
    caches = [torch.zeros(1, 1, 1, len(numbers)).to(FP8) for _ in range(2)]
    fused.norm_rope_store(
        numbers.repeat(3)[None],
        torch.cat([torch.ones(1, len(numbers) // 2), torch.zeros(1, len(numbers) // 2)], dim=1),
        *(torch.zeros(1, dtype=torch.int64) for _ in range(2)),
        LayerCache(*caches, KVScales(one[:, None, None], one[:, None, None], one, one)),
        QKVHeads(1, 1, None, None, 1e-6),
    )
    stored, expected = caches[1].flatten(), to_fp8(numbers[None, None], one).flatten()
    assert torch.equal(stored.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(stored.view(torch.uint8)[is_number], expected.view(torch.uint8)[is_number])


@EACH_LEVEL
@settings(max_examples=20)
@given(st.sampled_from(DTYPES), ROWS, SIZES, st.booleans())
def test_add_rms_norm_equals_that_of_torch(
    level: str, dtype: torch.dtype, num_rows: int, size: int, is_first: bool
) -> None:
    x, weight = random(num_rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    residuals = [None if is_first else random(num_rows, size, dtype=dtype, seed=2)] * 2
    if residuals[0] is not None:
        residuals[1] = residuals[0].clone()
    with highest_level(level):
        normed, residual = fused.add_rms_norm(x, residuals[0], weight, 1e-6)
    expected, expected_residual = fused.torch_add_rms_norm(x, residuals[1], weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    assert residual is (x if is_first else residuals[0])
    torch.testing.assert_close(normed, expected)


@EACH_LEVEL
@settings(max_examples=25)
@given(
    st.sampled_from(DTYPES),
    ROWS,
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([2, 10, 32, 64, 80, 96, 128]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, FP8]),
)
def test_norm_rope_store_equals_that_of_torch(
    level: str,
    dtype: torch.dtype,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    with_q_norm: bool,
    with_k_norm: bool,
    cache_dtype: torch.dtype,
) -> None:
    if cache_dtype is torch.float32:
        cache_dtype = dtype
    scales = None
    if cache_dtype is FP8:
        measured = (random(2, 2, num_kv_heads, 8, dtype=dtype, seed=i) for i in (7, 8))
        scales = scales_of(LayerCache(*measured))
    qkv = random(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = random(30, head_dim // 2, dtype=torch.float32, seed=1) * 7
    rope = torch.cat([angles.cos(), angles.sin()], dim=-1)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 30, (num_rows,), generator=generator)
    slots = torch.randperm(20, generator=generator)[:num_rows]
    norms = [
        random(head_dim, dtype=dtype, seed=3 + i) if wanted else None
        for i, wanted in enumerate((with_q_norm, with_k_norm))
    ]
    results = []
    for function in (fused.norm_rope_store, fused.torch_norm_rope_store):
        shape = (5, 4, num_kv_heads, head_dim)
        caches = [torch.full(shape, 9.0).to(cache_dtype) for _ in range(2)]
        with highest_level(level):
            heads = QKVHeads(num_heads, num_kv_heads, *norms, 1e-6)
            query = function(qkv, rope, positions, slots, LayerCache(*caches, scales), heads)
        results.append((query, *caches))
    if cache_dtype is FP8:
        assert torch.equal(results[0][2].view(torch.uint8), results[1][2].view(torch.uint8))
        # A key that lies between two numbers of FP8 may be rounded to either.
        numbers = [keys.view(torch.uint8).int() for _, keys, _ in results]
        assert int((numbers[0] - numbers[1]).abs().max()) <= 1
        results = [result[:1] for result in results]
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected)


@EACH_LEVEL
@settings(max_examples=20)
@given(st.sampled_from(DTYPES), ROWS, SIZES)
def test_silu_mul_equals_that_of_torch(
    level: str, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    gate_up = random(num_rows, 2 * size, dtype=dtype, scale=6)
    with highest_level(level):
        actual = fused.silu_mul(gate_up)
    torch.testing.assert_close(actual, fused.torch_silu_mul(gate_up))


@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_the_exponential_is_accurate_over_its_whole_range(level: str) -> None:
    # SiLU with a factor of one shows it: x / silu(x) - 1 = exp(-x).
    x = torch.linspace(-20, 87, 100_001)
    gate_up = torch.stack([-x, torch.ones_like(x)], dim=1)
    exact = -x.double() / (1 + x.double().exp())
    error = (fused.silu_mul(gate_up).squeeze(1).double() - exact).abs() / exact.abs()
    assert float(error[exact != 0].max()) < 1e-6


@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_extreme_values_infinities_and_nan_survive_the_fused_operations(level: str) -> None:
    x = torch.tensor([[-1e30, -100.0, 100.0, 1e30, math.inf, math.nan]])
    silu = fused.silu_mul(torch.cat([x, torch.ones_like(x)], dim=1))[0]
    assert silu[:2].abs().max() < 1e-8
    assert silu[2:5].tolist() == [100.0, float(torch.tensor(1e30)), math.inf]
    assert math.isnan(silu[5])
    normed, _ = fused.add_rms_norm(x.nan_to_num(0), None, torch.ones(6), 1e-6)
    assert normed.isfinite().all()
    halves = torch.tensor([[1.0, math.nan, math.inf, 3.0000002]] * 2).bfloat16()
    total, residual = fused.add_rms_norm(halves, torch.zeros_like(halves), halves[0], 1e-6)
    assert residual.isnan().sum() == 2
    assert residual.isinf().sum() == 2
    assert total.isnan().any()


@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_large_inputs_give_the_same_bits_with_one_thread_and_with_two(level: str) -> None:
    x, weight = random(600, 700, dtype=torch.bfloat16), random(700, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        normed, _ = fused.add_rms_norm(x, None, weight, 1e-6)
        results.append((normed, fused.silu_mul(x)))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_inputs_that_the_cpu_library_does_not_support_are_computed_by_torch(level: str) -> None:
    x = random(4, 64, dtype=torch.float64)
    torch.testing.assert_close(fused.silu_mul(x).double(), fused.torch_silu_mul(x).double())
    strided = random(64, 4, dtype=torch.float32).t()
    torch.testing.assert_close(fused.silu_mul(strided), fused.torch_silu_mul(strided.contiguous()))
    weight = torch.ones(64)
    torch.testing.assert_close(
        fused.add_rms_norm(strided, None, weight, 1e-6)[0],
        fused.torch_add_rms_norm(strided, None, weight, 1e-6)[0],
    )


@pytest.mark.parametrize(("position", "slot"), [(10, 0), (-1, 0), (0, 8), (0, -1)])
@EACH_LEVEL
@pytest.mark.usefixtures("at_level")
def test_an_invalid_position_or_slot_raises_and_writes_nothing(
    level: str, position: int, slot: int
) -> None:
    caches = [torch.zeros(2, 4, 1, 8) for _ in range(2)]
    with pytest.raises(IndexError, match="position is not below 10, or a slot"):
        fused.norm_rope_store(
            *(torch.ones(1, 24), torch.ones(10, 8), torch.tensor([position]), torch.tensor([slot])),
            *(LayerCache(*caches), QKVHeads(1, 1, None, None, 1e-6)),
        )
    assert all(int(cache.count_nonzero()) == 0 for cache in caches)


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos", "x86_64-macos"])
def test_the_cpu_kernels_compile_for_other_architectures(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is not None:
        compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target]
    elif (found := shutil.which(f"{target}-g++")) is not None:
        compiler = [found]
    else:
        pytest.skip(f"no compiler for {target}: pip install ziglang")
    sources = Path(cpu_library.__file__).parent.glob("*.cpp")
    options = ["-std=c++17", "-O1", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-c"]
    for source in sources:
        command = [*compiler, *options, str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
