"""What the benches share: options, turns, medians. And the repository is on the path."""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

sys.path.insert(0, str(Path(__file__).parents[2]))


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `--name VALUE` for each default, of its type; `doc` is the help.

    False is a flag, a type an option without a default, a tuple several values: words out of those
    of the tuple, or any numbers.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            made.add_argument(option, action="store_true")
        elif isinstance(default, type):
            made.add_argument(option, type=default)
        elif isinstance(default, tuple):
            kind = type(default[0])
            words = default if kind is str else None
            made.add_argument(option, nargs="+", type=kind, choices=words, default=default)
        else:
            made.add_argument(option, type=type(default), default=default, help="[%(default)s]")
    return made


def turns(arms: Mapping[str, Callable[[], T]], num_rounds: int) -> dict[str, list[T]]:
    """Results of each arm, one a round; rounds go forth and back, so a drift falls on all alike."""
    found: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(num_rounds):
        for name in reversed(arms) if number % 2 else arms:
            found[name].append(arms[name]())
    return found


def medians(rows: Iterable[Iterable[float]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def percentile(values: Iterable[float], share: float) -> float:
    """The percentile at `share` (0..1), by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
