"""`EngineFigures`: the figures of one engine of several, as of now, for one line on the screen.

An unknown value is None, never 0. If an engine does not answer, all its figures are None, because
older values may no longer be true.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, EngineState, KnobValue
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source, SourceStatus
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.ranks import slow_rank
from stepscope.recordings.state.session import SessionState

WINDOW_S = 60.0  # window of latencies and preemptions
RATE_WINDOW_S = 10.0  # window of quickly changing figures: budget, steps and tokens per second


class EngineFigures(NamedTuple):
    """Current figures of one engine. Shares are 0..1; None is unknown."""

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


def measure(history: History) -> dict[str, Any]:
    """The figures that take a millisecond, so that they are computed once a second, by name."""
    state, summary = history.state, _last_summary(history)
    has_rows = summary is not None and summary.num_rows is not None
    latency = history.windows.latency(None, WINDOW_S, 1)
    long, short = (history.windows.sums(None, each) for each in (WINDOW_S, RATE_WINDOW_S))
    # Without rows, a count of 0 is no proof that there was no preemption.
    is_counted = has_rows or long.num_preempted or (summary and state.totals)
    steps_per_s, tokens_per_s = short.steps_per_s, short.out_tokens_per_s
    if state.state in ("idle", "paused", "stopped"):  # it is known to run no steps
        steps_per_s = 0.0 if steps_per_s is None else steps_per_s
        tokens_per_s = 0.0 if tokens_per_s is None and has_rows else tokens_per_s
    return {
        "ttft_p95_ms": latency.ttft.p95_ms,
        "itl_p95_ms": latency.itl.p95_ms,
        "budget_used": short.budget_used,
        "num_preempted": long.num_preempted if is_counted else None,
        "steps_per_s": steps_per_s,
        "output_tokens_per_s": tokens_per_s,
        "prefix_hit_rate": long.prefix_hit_rate,
        "rank_wait": long.rank_wait,
        "slow_rank": slow_rank(long.rank_waits_ns, state.info),
    }


def figures(name: str, source: Source, measured: Mapping[str, Any]) -> EngineFigures:
    """Return the current figures; `measured`: what `measure` returned last, empty before that."""
    history, status, error = source.history, _status(source), source.error
    if status in ("starting", "connecting", "down"):
        return EngineFigures(name, status, error, info=history.info)
    state = history.state
    return EngineFigures(
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
        **measured,
    )


def _last_summary(history: History) -> StepSummary | None:
    return None if (last := history.last_step) is None else history.summary(last)


def _status(source: Source) -> SourceStatus:
    # An engine that has never answered and cannot be reached is down, not connecting.
    is_missing = source.status == "connecting" and source.error is not None
    return "down" if is_missing else source.status


def _seats(history: History, state: SessionState) -> int | None:
    summary = _last_summary(history)
    seats = state.knobs.get("max_num_seqs") if summary is None else summary.max_num_seqs
    if isinstance(seats, int) and not isinstance(seats, bool):
        return seats
    return None if state.info is None else state.info.max_num_seqs
