"""`Distribution`: many samples of one latency in little memory, exact while they fit."""

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.recordings.state.latency_samples import Ranked

SPREAD_RANKS = (50, 90, 95, 99)  # of a `LatencySpread`; also the maximum, as rank 100


class LatencySpread(NamedTuple):
    num_samples: int = 0
    at_ns: Mapping[int, int] = {}  # rank, 100 for the maximum -> percentile; empty without samples
    # Share of samples within the service level; None without a level or samples.
    within_slo: float | None = None


class Distribution:
    """Counts of whole numbers. The largest sample is always exact.

    Up to `max_values` distinct values are counted exactly. With more, only the leading `num_bits`
    of each are kept, as HdrHistogram does. A percentile is then too small by less than `error`.

    `level`: samples up to it are counted as within the service level.
    """

    __slots__ = ("_is_exact", "_max_values", "_num_bits", "count", "counts", "largest", "level",
                 "num_within")  # fmt: skip

    def __init__(
        self, level: float | None = None, max_values: int = 1 << 16, num_bits: int = 11
    ) -> None:
        self.level = level
        self.count = 0
        self.num_within = 0
        self.largest = 0
        self.counts: dict[int, int] = {}  # value -> weight
        self._max_values = max_values
        self._num_bits = num_bits
        self._is_exact = True

    @property
    def error(self) -> float:
        """By which share of itself a percentile may be too small; 0 while all are exact."""
        return 0.0 if self._is_exact else 2.0 ** (1 - self._num_bits)

    def add(self, value: int, weight: int = 1) -> None:
        """Add `weight` samples of a value. A negative value counts as 0."""
        # Simulations call it for every step, so it calls as few functions as it can.
        if value < 0:
            value = 0
        self.count += weight
        if self.level is not None and value <= self.level:
            self.num_within += weight
        if value > self.largest:
            self.largest = value
        if not self._is_exact:
            value = self._rounded(value)
        counts = self.counts
        counts[value] = counts.get(value, 0) + weight
        if self._is_exact and len(counts) > self._max_values:
            self._round_all()

    def percentiles(self, *ranks: float) -> list[int]:
        """Nearest-rank percentiles of `ranks` in (0, 100]; empty without samples."""
        return Ranked.of(self.counts.items()).percentiles(ranks) if self.count else []

    def spread(self) -> LatencySpread:
        """All percentiles at once, so that the values are sorted only once."""
        if not self.count:
            return LatencySpread()
        at_ns = dict(zip(SPREAD_RANKS, self.percentiles(*SPREAD_RANKS), strict=True))
        within = None if self.level is None else self.num_within / self.count
        return LatencySpread(self.count, at_ns | {100: self.largest}, within)

    def _rounded(self, value: int) -> int:
        shift = max(0, value.bit_length() - self._num_bits)
        return value >> shift << shift

    def _round_all(self) -> None:
        self._is_exact = False
        counts, self.counts = self.counts, {}
        for value, weight in counts.items():
            value = self._rounded(value)
            self.counts[value] = self.counts.get(value, 0) + weight
