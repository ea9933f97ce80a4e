"""The levels of the compiled CPU kernels: tests run each that this machine has, and name the rest.

With STEPSCOPE_CPU_LEVEL in its environment a run of the tests is that of a lesser machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.cpu.library import LEVELS, LibraryMissingError
from stepscope.kernels.dispatch import linear


def _usable_levels() -> tuple[list[str], str]:
    """The levels that run here, and why there are no more."""
    try:
        levels = cpu_library.usable_levels()
    except LibraryMissingError as error:
        return [], str(error)
    return levels, f"the best here is {levels[-1]}"


USABLE, _WHY_NO_MORE = _usable_levels()


def needs_level(level: str) -> pytest.MarkDecorator:
    """Skips a test where this level cannot run."""
    return pytest.mark.skipif(
        level not in USABLE, reason=f"no level {level} of the CPU kernels: {_WHY_NO_MORE}"
    )


EACH_LEVEL = pytest.mark.parametrize(
    "level", [pytest.param(level, marks=needs_level(level)) for level in LEVELS]
)


@contextmanager
def highest_level(level: str) -> Iterator[None]:
    """The engine uses no kernels above this level, in this process too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_library.LEVEL_VARIABLE, level)
        cpu_library.default_library.cache_clear()
        try:
            yield
        finally:
            cpu_library.default_library.cache_clear()


def linear_layouts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each weight layout that this machine can multiply with, the best first.

    A model that is loaded between two of them has the first one's.
    """
    weight = torch.zeros(2, 2, dtype=dtype)
    for layout, uses in (("packed", "is_usable"), ("oneDNN-packed", "_onednn_packs")):
        if getattr(linear, uses)(weight):
            yield layout
        monkeypatch.setattr(linear, uses, lambda weight: False)
    yield "plain"
