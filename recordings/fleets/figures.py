"""`EngineFigures`: the figures of one engine of several, as of now, for one line on the screen.

An unknown value is None, never 0. If an engine does not answer, all its figures are None, because
older values may no longer be true.
"""

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, EngineState, KnobValue
from stepscope.recordings.history.history import History
from stepscope.recordings.history.rates import Rates
from stepscope.recordings.history.source import Source, SourceStatus
from stepscope.recordings.state.ranks import slow_rank
from stepscope.recordings.state.series.latency import SLO, LatencyReport
from stepscope.recordings.state.session import SessionState

WINDOW_S = 60.0  # window of latencies and preemptions
RATE_WINDOW_S = 10.0  # window of quickly changing figures: budget, steps and tokens per second


class EngineFigures(NamedTuple):
    """Current figures of one engine.

    Shares are 0..1, latencies in milliseconds; None is unknown.
    """

    name: str
    status: SourceStatus
    error: str | None = None
    state: EngineState | None = None
    info: EngineInfo | None = None
    knobs: Mapping[str, KnobValue] = {}
    num_running: int | None = None
    num_waiting: int | None = None
    num_seats: int | None = None
    kv_used: float | None = None
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    budget_used: float | None = None
    num_preempted: int | None = None  # in the last minute
    num_lost: int | None = None
    steps_per_s: float | None = None
    output_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    rank_wait: float | None = None  # share of the time in steps that its ranks waited for one
    slow_rank: str = ""  # the one that they waited for longest
    slo: SLO = SLO()  # what its latencies are judged by

    @property
    def is_up(self) -> bool:
        return self.status not in ("starting", "connecting", "stale", "down")

    @property
    def load(self) -> int | None:
        if self.num_running is None or self.num_waiting is None:
            return None
        return self.num_running + self.num_waiting


class SlowFigures(NamedTuple):
    """The figures that take about a millisecond to compute, so they are computed once a second."""

    latency: LatencyReport
    long: Rates  # over WINDOW_S
    short: Rates  # over RATE_WINDOW_S
    has_rows: bool  # whether the engine publishes the rows of its steps


def measure(history: History) -> SlowFigures:
    """Compute the slow figures of an engine, over the seconds before its last message."""
    last = history.last_step
    summary = None if last is None else history.summary(last)
    return SlowFigures(
        history.windows.latency(None, WINDOW_S, 1),
        history.windows.rates(None, WINDOW_S),
        history.windows.rates(None, RATE_WINDOW_S),
        summary is not None and summary.num_rows is not None,
    )


def figures(name: str, source: Source, measured: SlowFigures | None) -> EngineFigures:
    """Return the current figures of one engine.

    `measured`: the engine's slow figures, as last computed; None if they were never computed.
    """
    history, status, error = source.history, _status(source), source.error
    if status in ("starting", "connecting", "down"):
        return EngineFigures(name, status, error, info=history.info)
    state = history.state
    found = EngineFigures(
        name=name,
        status=status,
        error=error,
        state=state.state,
        info=state.info,
        knobs=state.knobs,
        num_running=state.num_running if state.is_load_known else None,
        num_waiting=state.num_waiting if state.is_load_known else None,
        num_seats=_seats(history, state),
        kv_used=state.kv_share,
        num_lost=history.num_lost,
        slo=history.slo,
    )
    if measured is None:
        return found
    long, short, has_rows = measured.long, measured.short, measured.has_rows
    # An engine that stands still is known to run no steps.
    none = 0.0 if state.state in ("idle", "paused", "stopped") else None
    preemptions = long.num_preempted
    return found._replace(
        ttft_p95_ms=measured.latency.ttft.p95_ms,
        itl_p95_ms=measured.latency.itl.p95_ms,
        budget_used=short.budget_share,
        # Without rows, a count of 0 is no proof that there was no preemption.
        num_preempted=preemptions if has_rows or preemptions or state.totals else None,
        steps_per_s=_or(short.steps_per_s, none),
        output_tokens_per_s=_or(short.output_tokens_per_s, none if has_rows else None),
        prefix_hit_rate=long.prefix_hit_rate,
        rank_wait=long.rank_wait,
        slow_rank=slow_rank(long.rank_waits_ns, state.info),
    )


def _or(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None else value


def _status(source: Source) -> SourceStatus:
    """Return the status of a source.

    An engine that has never answered and cannot be reached is down, not connecting.
    """
    is_missing = source.status == "connecting" and source.error is not None
    return "down" if is_missing else source.status


def _seats(history: History, state: SessionState) -> int | None:
    last = history.last_step
    summary = None if last is None else history.summary(last)
    seats = state.knobs.get("max_num_seqs") if summary is None else summary.max_num_seqs
    if isinstance(seats, int) and not isinstance(seats, bool):
        return seats
    return None if state.info is None else state.info.max_num_seqs
