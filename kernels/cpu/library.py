"""Finds and loads the C++ kernels of `kernels/cpu/`: one library for each instruction set level.

`pip install` builds the libraries if there is a compiler; everything also works without them. They
use torch's OpenMP runtime and its threads, so torch must be imported first.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import torch  # first, for its OpenMP runtime

# In the order of `stepscope_cpu_level`. The built files are called `_<level>`.
LEVELS = ("baseline", "avx2", "avx512_bf16", "amx_bf16")
INTERFACE = 5  # version of the structures below; equal to `stepscope_interface`
# The highest level to use, or `none`: for debugging, and for tests of other CPUs' levels.
LEVEL_VARIABLE = "STEPSCOPE_CPU_LEVEL"
# Without these options pip would install an earlier build from its cache.
AGAIN = "install stepscope again with pip's --force-reinstall --no-deps --no-cache-dir"

# Arguments of the functions, packed into one structure: fields in the order of kernels/cpu/*.cpp,
# addresses and counts of 64 bits each (0 for none). Packing takes a third of the time that ctypes
# needs to convert as many arguments.
STEP = Struct("14q2d")
ATTENTION = Struct("7q")
ADD_RMS_NORM = Struct("8qd")
NORM_ROPE_STORE = Struct("20qd")
SILU_MUL = Struct("6q")
LINEAR = Struct("11q")

# `Dtype` of kernels/cpu/vec.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
# For each dtype of queries, the dtypes of KV caches that these kernels can read.
CACHES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn),
}

Function = Callable[[bytes], int]


class CpuLibrary(NamedTuple):
    """The functions of a library: arguments packed in a C structure, 0 or an error returned."""

    level: str
    attention: Function
    add_rms_norm: Function
    norm_rope_store: Function
    silu_mul: Function
    linear: Function  # with x in bf16 only from the level avx512_bf16 on
    linear_width: Callable[[], int]  # outputs in a panel of its weights


class LibraryMissingError(RuntimeError):
    """Raised if no library can be used; the message says why, and what to do."""


def load(level: str | None = None) -> CpuLibrary:
    """Load the library for `level`, or the best usable one. Raises LibraryMissingError."""
    usable = usable_levels()
    if level is not None and level not in usable:
        raise LibraryMissingError(f"no {level} kernels here; there are: {', '.join(usable)}")
    chosen = level or usable[-1]
    return _functions(chosen, ctypes.CDLL(str(_file(chosen))))


def usable_levels() -> list[str]:
    """Return the levels that were built and that this CPU can run, the best last; at least one.

    Leaves out levels above the one that the environment variable STEPSCOPE_CPU_LEVEL names.

    Raises LibraryMissingError: there is none, or the variable is not one of LEVELS.
    """
    highest = os.environ.get(LEVEL_VARIABLE) or LEVELS[-1]
    if highest == "none":
        raise LibraryMissingError(f"turned off by {LEVEL_VARIABLE}=none")
    if highest not in LEVELS:
        names = ", ".join(("none", *LEVELS))
        raise LibraryMissingError(f"{LEVEL_VARIABLE} is one of {names}, not {highest!r}")
    built = [level for level in LEVELS if _file(level) is not None]
    if "baseline" not in built:
        raise LibraryMissingError(
            f"the C++ kernels were not built: install g++ (apt install g++) or clang, then {AGAIN}"
        )
    try:
        probe = ctypes.CDLL(str(_file("baseline")))
    except OSError as error:
        raise LibraryMissingError(f"the C++ kernels do not load ({error}): {AGAIN}") from None
    if getattr(probe, "stepscope_interface", int)() != INTERFACE:
        raise LibraryMissingError(f"the C++ kernels were built from older sources: {AGAIN}")
    best = min(int(probe.stepscope_cpu_level()), LEVELS.index(highest))
    return [level for level in built if LEVELS.index(level) <= best]


@functools.cache
def default_library() -> CpuLibrary | None:
    """Return the best library; None if there is none. Loads it once in a process."""
    try:
        return load()
    except LibraryMissingError:
        return None


def _file(level: str) -> Path | None:
    # Built as extension modules, because a wheel can contain those, for one Python and platform.
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{level}{suffix}")
        if path.exists():
            return path
    return None


def _functions(level: str, library: ctypes.CDLL) -> CpuLibrary:
    functions = {}
    for name in CpuLibrary._fields[1:]:
        function = getattr(library, f"stepscope_{name}")
        function.argtypes = [] if name == "linear_width" else [ctypes.c_char_p]
        functions[name] = function
    return CpuLibrary(level, **functions)
