"""Latencies as exact samples, without buckets or averages: TTFT, ITL, TPOT, E2E and step time.

`Samples` keeps weighted samples by time. Requests that decode in the same two steps have the same
ITL, so a step of 64 decodes adds only one or two entries. Percentiles are nearest-rank: the p-th
percentile of N samples is the smallest sample that is at least as large as ceil(p / 100 * N) of
them. So a percentile is always a latency that some request really had.

Samples must not include time in which an operator had paused the engine, because such a wait breaks
no service level. `Timeline` subtracts that time before it adds samples.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_args

import msgspec

from stepscope.engine.protocol.wire import Totals
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.outcome import LatencyKind as LatencyKind
from stepscope.recordings.state.series.distribution import SPREAD_RANKS, LatencySpread
from stepscope.recordings.state.series.finished import FinishedRequests
from stepscope.recordings.state.series.latency_samples import Samples

TREND_BUCKETS = 60
_MAX_MS = 1e9  # larger estimates are ignored, ...
_MAX_COUNT = 2**31  # ... and so are larger counts in one record


class SLO(NamedTuple):
    """Upper bounds for TTFT and ITL that an operator has promised, in milliseconds."""

    ttft_ms: float = 500.0
    itl_ms: float = 50.0


class Series(NamedTuple):
    """Summary of one latency (such as TTFT) in a window, in milliseconds; None without samples."""

    num_samples: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    within_slo: float | None  # share of samples, 0..1; None without an SLO or samples
    trend_ms: tuple[float | None, ...]  # the maximum in each slice of the window, oldest first


class LatencyReport(NamedTuple):
    """Summaries of all latencies in the window (start_ns, end_ns] of engine time."""

    start_ns: int
    end_ns: int
    ttft: Series
    itl: Series
    tpot: Series
    step: Series
    served_ttft: Series
    served_itl: Series


def series_of(
    samples: Samples,
    start_ns: int,
    end_ns: int,
    slo_ms: float | None = None,
    buckets: int = TREND_BUCKETS,
) -> Series:
    """Percentiles, maximum and trend of the samples in (start_ns, end_ns]."""
    ranked = samples.ranked(samples.num_until(start_ns), samples.num_until(end_ns))
    if ranked is None:
        return Series(0, None, None, None, None, None, (None,) * buckets)
    p50, p95, p99 = ranked.percentiles((50, 95, 99))
    within_slo = None
    if slo_ms is not None:
        within_slo = ranked.num_up_to(slo_ms * 1e6) / ranked.count
    trend = tuple(
        None if worst is None else worst / 1e6 for worst in samples.worst(start_ns, end_ns, buckets)
    )
    largest = ranked.largest / 1e6
    return Series(ranked.count, p50 / 1e6, p95 / 1e6, p99 / 1e6, largest, within_slo, trend)


def estimates_in(totals: Totals) -> Iterator[tuple[LatencyKind, int, int]]:
    """Latencies that other engines publish as histograms: kind, nanoseconds, number of samples."""
    kinds: tuple[LatencyKind, ...] = ("ttft", "itl", "tpot")
    for kind in kinds:
        for ms, count in map(msgspec.structs.astuple, getattr(totals, kind)):
            if 0 <= ms < _MAX_MS and 0 < count < _MAX_COUNT:
                yield kind, round(ms * 1e6), count


def _spread(samples: Samples, level_ms: float | None) -> LatencySpread:
    ranked = samples.ranked()
    if ranked is None:
        return LatencySpread()
    at_ns = dict(zip(SPREAD_RANKS, ranked.percentiles(SPREAD_RANKS), strict=True))
    within = None
    if level_ms is not None:
        within = ranked.num_up_to(level_ms * 1e6) / ranked.count
    return LatencySpread(ranked.count, at_ns | {100: ranked.largest}, within)


class Latencies:
    """The samples of all latencies of one engine, and its finished requests."""

    def __init__(self, slo: SLO) -> None:
        self.slo = slo
        self.finished = FinishedRequests()
        self._samples: dict[LatencyKind, Samples] = {
            kind: Samples() for kind in get_args(LatencyKind)
        }

    def append(self, applied: AppliedStep) -> None:
        """Add the samples of a step."""
        record, outcome = applied.record, applied.outcome
        now_ns = record.tokens_ns
        if applied.is_one_step:  # else its duration is that of an interval
            self.of("step").add(now_ns, now_ns - record.schedule_start_ns)
        for kind, ns, number, _ in outcome.waits():
            self.of(kind).add(now_ns, ns, number)
        for finished in outcome.finished:
            self.finished.add(now_ns, finished)
        if record.totals is not None:
            for kind, ns, number in estimates_in(record.totals):
                self.of(kind).add(now_ns, ns, number)

    def spreads(self) -> dict[LatencyKind, LatencySpread]:
        """Percentiles of all latencies, and the shares within the service levels."""
        levels: dict[LatencyKind, float] = {"ttft": self.slo.ttft_ms, "itl": self.slo.itl_ms}
        return {kind: _spread(each, levels.get(kind)) for kind, each in self._samples.items()}

    def of(self, kind: LatencyKind) -> Samples:
        return self._samples[kind]

    def cut(self, start_ns: int, end_ns: int) -> "Latencies":
        """A copy of the samples in (start_ns, end_ns]. This is cheap, unlike a report."""
        part = Latencies(self.slo)
        part.finished = self.finished.cut(start_ns, end_ns)
        part._samples = {kind: each.cut(start_ns, end_ns) for kind, each in self._samples.items()}
        return part

    def report(self, start_ns: int, end_ns: int, buckets: int = TREND_BUCKETS) -> LatencyReport:
        levels: dict[LatencyKind, float | None] = {
            "ttft": self.slo.ttft_ms, "itl": self.slo.itl_ms, "tpot": None, "step": None,
            "served_ttft": self.slo.ttft_ms, "served_itl": self.slo.itl_ms,
        }  # fmt: skip
        series = {
            kind: series_of(self._samples[kind], start_ns, end_ns, level, buckets)
            for kind, level in levels.items()
        }
        return LatencyReport(start_ns, end_ns, **series)

    def after(self, earlier: "Latencies") -> "Latencies":
        """A new object with the samples of `earlier`, then those of `self`. Neither is changed."""
        whole = Latencies(self.slo)
        whole.finished = self.finished.after(earlier.finished)
        for kind, each in self._samples.items():
            whole._samples[kind] = each.after(earlier._samples[kind])
        return whole

    def forget_before(self, time_ns: int) -> None:
        for samples in self._all:
            samples.forget_before(time_ns)

    def forget_after(self, time_ns: int) -> None:
        for samples in self._all:
            samples.forget_after(time_ns)

    @property
    def _all(self) -> list[Samples | FinishedRequests]:
        return [self.finished, *self._samples.values()]
