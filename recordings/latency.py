"""Latencies as exact samples: TTFT, ITL, TPOT and the time of a step. No buckets, no averages.

`Samples` keeps weighted samples by time: requests that decode in the same two steps have the same
inter-token latency, so a step of 64 decodes is one or two entries. Percentiles are nearest-rank:
the p-th of N samples is the smallest sample that at least ceil(p / 100 * N) samples do not exceed.
It is always a latency that some request really had.

Time in which the operator had paused the engine is in none of them: who feeds samples leaves it out
(`Timeline`), for a wait that the operator made breaks no service level.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.outcome import Outcome

TREND_BUCKETS = 60

LatencyKind: TypeAlias = Literal["ttft", "itl", "tpot", "step"]


class SLO(NamedTuple):
    """What an operator has promised, in milliseconds."""

    ttft_ms: float = 500.0
    itl_ms: float = 50.0


class Series(NamedTuple):
    """One kind of latency in a window, in milliseconds; None where there is no sample."""

    num_samples: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    within_slo: float | None  # share of samples, 0..1; None without an SLO or a sample
    trend_ms: tuple[float | None, ...]  # the worst of each slice of the window, oldest first


class LatencyReport(NamedTuple):
    """Latencies in (end_ns - window, end_ns], engine time."""

    start_ns: int
    end_ns: int
    ttft: Series
    itl: Series
    tpot: Series
    step: Series


class Samples:
    """Weighted samples in order of time. One writer; the holder of the lock reads."""

    def __init__(self) -> None:
        self._times = array("q")
        self._values = array("q")
        self._weights = array("q")

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Time, value and weight of each sample."""
        return zip(self._times, self._values, self._weights, strict=True)

    def add(self, time_ns: int, value_ns: int, weight: int = 1) -> None:
        """Append; a time before the last one counts as the last one."""
        times = self._times
        times.append(max(time_ns, times[-1]) if times else time_ns)
        self._values.append(bounded(value_ns))
        self._weights.append(weight)

    def forget_before(self, time_ns: int) -> None:
        num_old = bisect_left(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[:num_old]

    def forget_after(self, time_ns: int) -> None:
        num_kept = bisect_right(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[num_kept:]

    def window(self, start_ns: int, end_ns: int) -> tuple["array[int]", "array[int]"]:
        """Values and weights of the samples in (start_ns, end_ns]."""
        first = bisect_right(self._times, start_ns)
        last = bisect_right(self._times, end_ns)
        return self._values[first:last], self._weights[first:last]

    def cut(self, start_ns: int, end_ns: int) -> "Samples":
        """A copy of the samples in (start_ns, end_ns]."""
        first = bisect_right(self._times, start_ns)
        last = bisect_right(self._times, end_ns)
        part = Samples()
        part._times = self._times[first:last]
        part._values = self._values[first:last]
        part._weights = self._weights[first:last]
        return part

    def series(
        self, start_ns: int, end_ns: int, slo_ms: float | None = None, buckets: int = TREND_BUCKETS
    ) -> Series:
        """What happened in (start_ns, end_ns]."""
        values, weights = self.window(start_ns, end_ns)
        if not values:
            return Series(0, None, None, None, None, None, (None,) * buckets)
        # Value and weight in one number: sorting those takes a quarter of sorting pairs.
        base = max(weights) + 1
        ordered = sorted(
            [value * base + weight for value, weight in zip(values, weights, strict=True)]
        )
        ranks = list(accumulate([number % base for number in ordered]))
        count = ranks[-1]
        p50, p95, p99 = (
            ordered[bisect_left(ranks, math.ceil(rank * count / 100))] // base
            for rank in (50, 95, 99)
        )
        within_slo = None
        if slo_ms is not None:
            num_within = bisect_right(ordered, math.floor(slo_ms * 1e6) * base + base - 1)
            within_slo = ranks[num_within - 1] / count if num_within else 0.0
        trend = tuple(
            None if worst is None else worst / 1e6
            for worst in self._trend(start_ns, end_ns, buckets)
        )
        return Series(
            count, p50 / 1e6, p95 / 1e6, p99 / 1e6, ordered[-1] // base / 1e6, within_slo, trend
        )

    def _trend(self, start_ns: int, end_ns: int, buckets: int) -> list[int | None]:
        """Slices end at multiples of their width, so that they stand still while time goes on."""
        worst: list[int | None] = []
        width_ns = max(1, (end_ns - start_ns) // buckets)
        newest_ns = -(-end_ns // width_ns) * width_ns
        first = bisect_right(self._times, newest_ns - width_ns * buckets)
        for bucket in range(buckets - 1, -1, -1):
            last = bisect_right(self._times, min(newest_ns - width_ns * bucket, end_ns), first)
            worst.append(max(self._values[first:last], default=None))
            first = last
        return worst


def percentiles(ordered: list[tuple[int, int]], count: int, ranks: tuple[float, ...]) -> list[int]:
    """Nearest-rank percentiles of weighted samples.

    Args:
        ordered: (value, weight), by value; not empty.
        count: sum of the weights.
        ranks: percentages, ascending, each in (0, 100].
    """
    found: list[int] = []
    seen = 0
    position = -1
    value = ordered[0][0]
    for rank in ranks:
        wanted = math.ceil(rank * count / 100)
        while seen < wanted:
            position += 1
            value, weight = ordered[position]
            seen += weight
        found.append(value)
    return found


def bounded(value: int) -> int:
    """The nearest number that an array holds."""
    return min(max(value, -(2**63)), 2**63 - 1)


class Latencies:
    """The four kinds of latency of one engine."""

    def __init__(self, slo: SLO) -> None:
        self.slo = slo
        self.ttft = Samples()
        self.itl = Samples()
        self.tpot = Samples()
        self.step = Samples()

    def add(self, tokens_ns: int, step_ns: int, outcome: Outcome) -> None:
        """Samples of a step whose tokens were known at `tokens_ns`."""
        self.step.add(tokens_ns, step_ns)
        for gap_ns, weight in outcome.gaps_ns.items():
            self.itl.add(tokens_ns, gap_ns, weight)
        for _, ttft_ns in outcome.ttft_ns:
            self.ttft.add(tokens_ns, ttft_ns)
        for _, tpot_ns in outcome.tpot_ns:
            self.tpot.add(tokens_ns, tpot_ns)

    def of(self, kind: LatencyKind) -> Samples:
        return {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "step": self.step}[kind]

    def cut(self, start_ns: int, end_ns: int) -> "Latencies":
        """A copy of what is in (start_ns, end_ns]: cheap, unlike a report on it."""
        part = Latencies(self.slo)
        part.ttft = self.ttft.cut(start_ns, end_ns)
        part.itl = self.itl.cut(start_ns, end_ns)
        part.tpot = self.tpot.cut(start_ns, end_ns)
        part.step = self.step.cut(start_ns, end_ns)
        return part

    def report(self, start_ns: int, end_ns: int, buckets: int = TREND_BUCKETS) -> LatencyReport:
        return LatencyReport(
            start_ns,
            end_ns,
            self.ttft.series(start_ns, end_ns, self.slo.ttft_ms, buckets),
            self.itl.series(start_ns, end_ns, self.slo.itl_ms, buckets),
            self.tpot.series(start_ns, end_ns, None, buckets),
            self.step.series(start_ns, end_ns, None, buckets),
        )

    def forget_before(self, time_ns: int) -> None:
        for samples in (self.ttft, self.itl, self.tpot, self.step):
            samples.forget_before(time_ns)

    def forget_after(self, time_ns: int) -> None:
        for samples in (self.ttft, self.itl, self.tpot, self.step):
            samples.forget_after(time_ns)
