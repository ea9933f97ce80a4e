"""The kernels with tile instructions (AMX) keep the laws of the other levels, on any AVX-512 CPU.

Where a processor has the instructions, test_kernels.py and test_cpu_linear.py run them as one level
of several. Here the same sources are compiled with `emulated_tiles.h`.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.cpu import linear as cpu_linear
from stepscope.kernels.cpu.library import CpuLibrary
from stepscope.kernels.cpu.linear import BF16_LEVELS
from tests.compute import test_cpu_linear as linear
from tests.compute import test_kernels as attention
from tests.support.cpu_levels import needs_level

PAIRS, TILES = BF16_LEVELS
pytestmark = [pytest.mark.slow, needs_level(PAIRS)]

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LAWS: list[Callable[[], None]] = [
    partial(attention.test_bf16_stays_close_to_the_reference, "cpu-tiles", BF16),
    partial(attention.test_bf16_stays_close_to_the_reference, "cpu-tiles", FP8),
    partial(attention.test_cpp_equals_the_reference_whatever_the_shape, level=TILES),
    partial(
        attention.test_cpp_gives_a_request_the_same_bits_in_any_batch_and_with_any_threads,
        TILES, BF16,
    ),
    *(
        partial(
            attention.test_what_slots_without_a_token_of_the_request_hold_changes_nothing,
            "cpu-tiles", BF16, options,
        )
        for options in ({}, {"sliding_window": 9})
    ),
    partial(attention.test_cpp_ignores_what_earlier_calls_left_in_its_memory, TILES, BF16),
    partial(linear.test_packed_products_of_all_shapes_are_exact_up_to_one_rounding, dtype=BF16),
    partial(linear.test_a_gated_product_is_the_silu_of_one_half_times_the_other_half, dtype=BF16),
    *(
        partial(
            linear.test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads,
            BF16, num_rows,
        )
        for num_rows in (1, 16, 33, 700)
    ),
    partial(linear.test_infinities_and_nan_pass_through_the_product, BF16),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    sources = Path(cpu_library.__file__).parent
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
            *("-fno-math-errno", "-fno-trapping-math", "-march=x86-64-v4", "-mavx512bf16"),
            *("-D__AMX_BF16__", "-include", str(Path(__file__).with_name("emulated_tiles.h"))),
            *("-o", str(library)),
            *(str(sources / f"{name}.cpp") for name in ("attention", "fused", "linear")),
        ],
        check=True,
    )
    return cpu_library._functions(TILES, ctypes.CDLL(str(library)))


@pytest.fixture(autouse=True)
def emulated(compiled: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_library, "load", lambda level=None: compiled)
    monkeypatch.setattr(cpu_linear, "default_library", lambda: compiled)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.func.__name__)
def test_tiles_keep_the_laws_of_every_level(law: Callable[[], None]) -> None:
    law()
