"""Latencies as exact samples, without buckets or averages: TTFT, ITL, TPOT, E2E and step time.

`Samples` keeps weighted samples by time. Requests that decode in the same two steps have the same
ITL, so a step of 64 decodes adds only one or two entries. Percentiles are nearest-rank: the p-th
percentile of N samples is the smallest sample that is at least as large as ceil(p / 100 * N) of
them. So a percentile is always a latency that some request really had.

Samples must not include time in which an operator had paused the engine, because such a wait breaks
no service level. `Timeline` subtracts that time before it adds samples.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.recordings.state.distribution import SPREAD_RANKS, LatencySpread
from stepscope.recordings.state.latency_samples import FinishedRequests, Samples
from stepscope.recordings.state.outcome import AppliedStep

TREND_BUCKETS = 60
_MAX_MS = 1e9  # larger estimates are ignored, ...
_MAX_COUNT = 2**31  # ... and so are larger counts in one record

LatencyKind: TypeAlias = Literal["ttft", "itl", "tpot", "e2e", "served_ttft", "served_itl", "step"]


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
    spread = spread_of(samples.cut(start_ns, end_ns), slo_ms)
    p50, p95, p99, largest = (
        None if ns is None else ns / 1e6 for ns in map(spread.at_ns.get, (50, 95, 99, 100))
    )
    trend = tuple(
        None if worst is None else worst / 1e6 for worst in samples.worst(start_ns, end_ns, buckets)
    )
    return Series(spread.num_samples, p50, p95, p99, largest, spread.within_slo, trend)


def waits_in(applied: AppliedStep) -> Iterator[tuple[LatencyKind, int, int, int | None]]:
    """The waits that ended in a step: latency, nanoseconds, how many, and the request of one."""
    outcome, totals = applied.outcome, applied.record.totals
    for gap_ns, number in outcome.gaps_ns.items():
        yield "itl", gap_ns, number, outcome.gap_request_ids[gap_ns]
    for request_id, ttft_ns in outcome.ttft_ns:
        yield "ttft", ttft_ns, 1, request_id
    for request_id, tpot_ns in outcome.tpot_ns:
        yield "tpot", tpot_ns, 1, request_id
    for request_id, e2e_ns in outcome.e2e_ns:
        yield "e2e", e2e_ns, 1, request_id
    for request_id, ttft_ns in outcome.served_ttft_ns:
        yield "served_ttft", ttft_ns, 1, request_id
    for gap_ns, number in outcome.served_itl_ns.items():
        yield "served_itl", gap_ns, number, None
    if totals is None:
        return
    kinds: tuple[LatencyKind, ...] = ("ttft", "itl", "tpot")
    for kind in kinds:  # of other engines, which publish histograms
        for ms, number in map(msgspec.structs.astuple, getattr(totals, kind)):
            if 0 <= ms < _MAX_MS and 0 < number < _MAX_COUNT:
                yield kind, round(ms * 1e6), number, None


def spread_of(samples: Samples, level_ms: float | None) -> LatencySpread:
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
        self.of: dict[LatencyKind, Samples] = {kind: Samples() for kind in get_args(LatencyKind)}
        self.finished = FinishedRequests()

    def append(self, applied: AppliedStep) -> None:
        record = applied.record
        now_ns = record.tokens_ns
        if applied.is_one_step:  # else its duration is that of an interval
            self.of["step"].add(now_ns, now_ns - record.schedule_start_ns)
        for kind, ns, number, _ in waits_in(applied):
            self.of[kind].add(now_ns, ns, number)
        for finished in applied.outcome.finished:
            self.finished.append(now_ns, *finished)

    def _level_ms(self, kind: LatencyKind) -> float | None:
        levels_ms = {"ttft": self.slo.ttft_ms, "itl": self.slo.itl_ms}
        return levels_ms.get(kind.removeprefix("served_"))

    def spreads(self) -> dict[LatencyKind, LatencySpread]:
        """Percentiles of all latencies, and the shares within the service levels."""
        return {kind: spread_of(samples, self._level_ms(kind)) for kind, samples in self.of.items()}

    def cut(self, start_ns: int, end_ns: int) -> "Latencies":
        """A copy of the samples in (start_ns, end_ns]. This is cheap, unlike a report."""
        part = Latencies(self.slo)
        part.of = {kind: samples.cut(start_ns, end_ns) for kind, samples in self.of.items()}
        part.finished = self.finished.cut(start_ns, end_ns)
        return part

    def report(self, start_ns: int, end_ns: int, buckets: int = TREND_BUCKETS) -> LatencyReport:
        found = {
            kind: series_of(samples, start_ns, end_ns, self._level_ms(kind), buckets)
            for kind, samples in self.of.items()
            if kind in LatencyReport._fields
        }
        return LatencyReport(start_ns, end_ns, **found)

    def forget_before(self, time_ns: int) -> None:
        for rows in (self.finished, *self.of.values()):
            rows.forget_before(time_ns)

    def forget_after(self, time_ns: int) -> None:
        for rows in (self.finished, *self.of.values()):
            rows.forget_after(time_ns)
