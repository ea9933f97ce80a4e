"""`WaitCounts`: a histogram of one latency, in bounded memory.

Exact to the nanosecond for up to `MAX_DISTINCT` different values. With more, values are rounded
down to multiples of ever larger powers of two; `resolution_ns` is the current power.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from stepscope.recordings.figures.sums import LatencySpread
from stepscope.recordings.figures.table import RANKS

MAX_DISTINCT = 1 << 16


class WaitCounts:
    """How often each value of one latency occurred in a run. Only one thread may write.

    Args:
        bound_ns: the service level; a longer wait is a breach.
    """

    def __init__(self, bound_ns: float | None = None) -> None:
        self.bound_ns = bound_ns
        self.num_samples = 0
        self.num_within = 0
        self.max_ns: int | None = None
        self._counts: dict[int, int] = {}
        self._shift = 0

    @property
    def resolution_ns(self) -> int:
        """Values are rounded down to multiples of this; 1 while all values are exact."""
        return 1 << self._shift

    @property
    def within_slo(self) -> float | None:
        """Share of samples within the service level; None without a level or samples."""
        if self.bound_ns is None or not self.num_samples:
            return None
        return self.num_within / self.num_samples

    def add(self, value_ns: int, weight: int = 1) -> None:
        self.num_samples += weight
        if self.bound_ns is not None and value_ns <= self.bound_ns:
            self.num_within += weight
        if self.max_ns is None or value_ns > self.max_ns:
            self.max_ns = value_ns
        key = value_ns >> self._shift
        self._counts[key] = self._counts.get(key, 0) + weight
        if len(self._counts) > MAX_DISTINCT:
            self._fold()

    def percentiles(self, ranks: Sequence[int]) -> list[int]:
        """Nearest-rank percentiles, in nanoseconds; an empty list if there are no samples."""
        if not self.num_samples:
            return []
        counts, keys = self._counts, sorted(self._counts)
        upto = list(accumulate(map(counts.__getitem__, keys)))
        wanted = [math.ceil(rank * self.num_samples / 100) for rank in ranks]
        return [keys[bisect_left(upto, number)] << self._shift for number in wanted]

    def _fold(self) -> None:
        while len(self._counts) > MAX_DISTINCT // 2:
            self._shift += 1
            folded: dict[int, int] = {}
            for key, weight in self._counts.items():
                folded[key >> 1] = folded.get(key >> 1, 0) + weight
            self._counts = folded


def spread_of(counts: WaitCounts) -> LatencySpread:
    """Compute all percentiles of a latency at once, so that its values are sorted only once."""
    ranks = [rank for rank in RANKS if rank < 100]
    at_ns = dict(zip(ranks, counts.percentiles(ranks), strict=False))
    if counts.max_ns is not None:
        at_ns[100] = counts.max_ns
    return LatencySpread(counts.num_samples, at_ns, counts.within_slo)
