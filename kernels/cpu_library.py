"""Finds and loads the C++ kernels of `kernels/cpu/`: one library for each level of instructions.

`pip install` builds them when there is a compiler; nothing needs them. They share the OpenMP
runtime that torch brings, so torch is imported first: its threads are theirs.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401  (first, for its OpenMP runtime)

# In the order of `stepscope_cpu_level`. The names are those of the built files, `_cpu_<level>`.
LEVELS = ("baseline", "avx2", "avx512_bf16")
TURNED_OFF_BY = "STEPSCOPE_NO_NATIVE"

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class StepArguments(ctypes.Structure):
    """What attention is told of a step; `Step` in kernels/cpu/attention.h says what each is."""

    _fields_ = [
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        ("table_stride", _INT64),
        ("num_requests", _INT64),
        ("num_blocks", _INT64),
        ("block_size", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("is_bf16", _INT64),
        ("sliding_window", _INT64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


class CpuLibrary(NamedTuple):
    """The functions of one library. Addresses are ints; the last argument is how many threads."""

    level: str
    attention: Callable[..., int]
    add_rms_norm: Callable[..., None]
    norm_rope_store: Callable[..., int]
    silu_mul: Callable[..., None]
    argmax: Callable[..., None]


class LibraryMissingError(RuntimeError):
    """There is no library to use; the message says why and what to do about it."""


def load(level: str | None = None) -> CpuLibrary:
    """The library for `level`, or the best one that was built and that this CPU can run.

    Raises:
        LibraryMissingError: there is none.
    """
    usable = usable_levels()
    if level is not None and level not in usable:
        raise LibraryMissingError(f"no {level} kernels here; there are: {', '.join(usable)}")
    chosen = level or usable[-1]
    return _functions(chosen, ctypes.CDLL(str(_file(chosen))))


def usable_levels() -> list[str]:
    """What was built and runs on this CPU, the best last; at least one.

    Raises:
        LibraryMissingError: there is none.
    """
    if os.environ.get(TURNED_OFF_BY, "0") not in ("", "0"):
        raise LibraryMissingError(f"turned off by {TURNED_OFF_BY}")
    built = [level for level in LEVELS if _file(level) is not None]
    if "baseline" not in built:
        raise LibraryMissingError(
            "the C++ kernels were not built: install a C++ compiler (apt install g++), then "
            "install stepscope again"
        )
    try:
        probe = ctypes.CDLL(str(_file("baseline")))
    except OSError as error:
        raise LibraryMissingError(
            f"the C++ kernels do not load ({error}): install stepscope again"
        ) from None
    best = int(probe.stepscope_cpu_level())
    return [level for level in built if LEVELS.index(level) <= best]


@functools.cache
def default_library() -> CpuLibrary | None:
    """The best library, found once a process; None where there is none."""
    try:
        return load()
    except LibraryMissingError:
        return None


def _file(level: str) -> Path | None:
    # Built as extension modules, which is what a wheel can carry, for one Python and platform.
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_cpu_{level}{suffix}")
        if path.exists():
            return path
    return None


def _functions(level: str, library: ctypes.CDLL) -> CpuLibrary:
    signatures: dict[str, list[type[object]]] = {
        "attention": [_POINTER] * 6 + [ctypes.c_int],
        "add_rms_norm": [_POINTER] * 4 + [_INT64] * 2 + [ctypes.c_float] + [ctypes.c_int] * 2,
        "norm_rope_store": [_POINTER] * 2
        + [_INT64]
        + [_POINTER] * 2
        + [_INT64]
        + [_POINTER] * 5
        + [_INT64] * 4
        + [ctypes.c_float]
        + [ctypes.c_int] * 2,
        "silu_mul": [_POINTER] * 2 + [_INT64] * 2 + [ctypes.c_int] * 2,
        "argmax": [_POINTER] * 2 + [_INT64] * 2 + [ctypes.c_int] * 2,
    }
    functions = {}
    for name, argtypes in signatures.items():
        function = getattr(library, f"stepscope_{name}")
        function.argtypes = argtypes
        returns_status = name in ("attention", "norm_rope_store")
        function.restype = ctypes.c_int if returns_status else None
        functions[name] = function
    return CpuLibrary(level, **functions)
