"""`WaitSlices`: waits by when they ended and what they shared their step with, in bounded memory.

What is near in time is alike: a long prompt delays all who decode beside it. How far a percentile
can be trusted is told by how much it differs from one stretch of the run to the next.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

MAX_SLICES = 80  # kept; from then on two become one
_FIRST_WIDTH_NS = 100_000_000
_BINS_PER_OCTAVE = 64  # about 1 % wide

Stratum: TypeAlias = Hashable
Bins: TypeAlias = dict[int, int]  # bin of a wait -> how many
Slice: TypeAlias = dict[Stratum, Bins]


class WaitSlices:
    """Waits in equal slices of time; the slices double as the run goes on. One writer."""

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._slices: list[Slice] = []

    def add(self, time_ns: int, wait_ns: int, weight: int = 1, stratum: Stratum = 0) -> None:
        """A wait that ended so long after the run began; times must not run backwards."""
        while time_ns // self.width_ns >= MAX_SLICES:
            self._fold()
        place = time_ns // self.width_ns
        while place >= len(self._slices):
            self._slices.append({})
        bins = self._slices[place].setdefault(stratum, {})
        at = bin_of(wait_ns)
        bins[at] = bins.get(at, 0) + weight

    def grouped(self, num_groups: int, key: Callable[[Stratum], Stratum | None]) -> list[Slice]:
        """All of it in so many stretches of about the same length, or as many as there are.

        Args:
            key: in which stratum the waits of one are to be counted; None leaves them out.
        """
        num_groups = min(num_groups, len(self._slices))
        groups: list[Slice] = [{} for _ in range(num_groups)]
        for place, each in enumerate(self._slices):
            group = groups[place * num_groups // len(self._slices)]
            for stratum, bins in each.items():
                into = key(stratum)
                if into is not None:
                    _merge(group.setdefault(into, {}), bins)
        return groups

    def _fold(self) -> None:
        """Two slices become one."""
        self.width_ns *= 2
        folded = self._slices[::2]
        for into, other in zip(folded, self._slices[1::2], strict=False):
            for stratum, bins in other.items():
                _merge(into.setdefault(stratum, {}), bins)
        self._slices = folded


def _merge(into: Bins, bins: Bins) -> None:
    for at, number in bins.items():
        into[at] = into.get(at, 0) + number


def bin_of(wait_ns: int) -> int:
    """Grows with the wait; about 1 % of it wide."""
    octave = max(0, wait_ns.bit_length() - _BINS_PER_OCTAVE.bit_length())
    return octave * _BINS_PER_OCTAVE + (max(0, wait_ns) >> octave)


def start_of(at: int) -> int:
    """The smallest wait of a bin, in nanoseconds."""
    octave = max(0, at // _BINS_PER_OCTAVE - 1)
    return (at - octave * _BINS_PER_OCTAVE) << octave


def size_class(number: int) -> int:
    """Of tokens or of rows: each number to 8, above it classes at most a fifth wide."""
    if number <= 8:
        return number
    octave = number.bit_length() - 3
    return octave * 4 + (number >> octave) + 1


def num_waits(slices: Iterable[Slice]) -> int:
    """In all strata."""
    return sum(sum(bins.values()) for each in slices for bins in each.values())
