"""`WaitSlices`: a latency by the time each wait ended and by kind of work, in bounded memory.

A slice is a short part of the run; within it, waits are divided into strata by kind of work. Waits
close in time are alike: one long prompt delays all decodes beside it. So the error of a percentile
is estimated from its variation between slices.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

MAX_SLICES = 80  # beyond that, every two slices are merged
_FIRST_WIDTH_NS = 100_000_000
_BINS_PER_OCTAVE = 64  # about 1 % wide
_NUM_EXACT_BITS = _BINS_PER_OCTAVE.bit_length()

Stratum: TypeAlias = Hashable
Bins: TypeAlias = dict[int, int]  # bin of a wait -> number of waits
Slice: TypeAlias = dict[Stratum, Bins]


class WaitSlices:
    """Waits in equal slices of time, whose width doubles as the run grows.

    Only one thread may write.
    """

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._slices: list[Slice] = []

    def add(self, time_ns: int, wait_ns: int, weight: int = 1, stratum: Stratum = 0) -> None:
        """Add a wait that ended `time_ns` after the run began. Call it in order of time."""
        while (place := time_ns // self.width_ns) >= MAX_SLICES:
            self._fold()
        while place >= len(self._slices):
            self._slices.append({})
        bins = self._slices[place].setdefault(stratum, {})
        at = bin_of(wait_ns)
        bins[at] = bins.get(at, 0) + weight

    def grouped(self, num_groups: int) -> list[Slice]:
        """Merge the slices into at most `num_groups` longer ones of about equal length."""
        num_groups = min(num_groups, len(self._slices))
        groups: list[Slice] = [{} for _ in range(num_groups)]
        for place, each in enumerate(self._slices):
            group = groups[place * num_groups // len(self._slices)]
            for stratum, bins in each.items():
                _merge(group, stratum, bins)
        return groups

    def _fold(self) -> None:
        """Merge every two slices into one."""
        self.width_ns *= 2
        folded = self._slices[::2]
        for into, other in zip(folded, self._slices[1::2], strict=False):
            for stratum, bins in other.items():
                _merge(into, stratum, bins)
        self._slices = folded


def in_strata(slices: Iterable[Slice], is_meant: Callable[[Stratum], bool]) -> list[Slice]:
    """Copy slices, with only the strata (kinds of work) for which `is_meant` returns true."""
    return [{key: bins for key, bins in each.items() if is_meant(key)} for each in slices]


def as_one(slices: Iterable[Slice]) -> list[Slice]:
    """Copy slices, with all strata of a slice merged into one."""
    found: list[Slice] = []
    for each in slices:
        found.append({})
        for bins in each.values():
            _merge(found[-1], 0, bins)
    return found


def _merge(into: Slice, stratum: Stratum, bins: Bins) -> None:
    """Add waits to a stratum of a slice."""
    known = into.get(stratum)
    if known is None:
        into[stratum] = bins.copy()
        return
    for at, number in bins.items():
        known[at] = known.get(at, 0) + number


def bin_of(wait_ns: int) -> int:
    """The histogram bin of a wait. Bins grow with the wait and are about 1 % of it wide."""
    octave = wait_ns.bit_length() - _NUM_EXACT_BITS
    if wait_ns <= 0 or octave <= 0:
        return max(0, wait_ns)
    return octave * _BINS_PER_OCTAVE + (wait_ns >> octave)


def start_of(at: int) -> int:
    """The shortest wait that belongs to a bin, in nanoseconds."""
    octave = max(0, at // _BINS_PER_OCTAVE - 1)
    return (at - octave * _BINS_PER_OCTAVE) << octave


def size_class(number: int) -> int:
    """The size class of a number of tokens or rows: exact up to 8, then at most a fifth wide."""
    if number <= 8:
        return number
    octave = number.bit_length() - 3
    return octave * 4 + (number >> octave) + 1


def num_waits(slices: Iterable[Slice]) -> int:
    """Number of waits in all strata of all slices."""
    return sum(sum(bins.values()) for each in slices for bins in each.values())
