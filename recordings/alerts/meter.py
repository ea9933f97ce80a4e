"""`Meter`: measures the figures that rules name, on a live source."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from stepscope.recordings.alerts.rule import WAITING_FOR
from stepscope.recordings.history.source import Source
from stepscope.recordings.state.in_flight import seconds_of
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState

WINDOW_S = 10.0  # window of the figures, and of the restarts


class Meter:
    """Measures the figures of one source for rules. Belongs to one thread.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._heard_s: float | None = None  # when the newest message came
        self._last_sequence: int | None = None  # its number
        self._engine_id: str | None = None
        self._restarts_s: deque[float] = deque()

    def measure(self) -> Mapping[str, float | None]:
        """Return name -> value. A value is None without samples.

        Figures that cannot be measured now have no entry.
        """
        now_s = self._clock()
        history = self._source.history
        self._note_engine(now_s)
        if history.last_sequence != self._last_sequence:
            self._heard_s, self._last_sequence = now_s, history.last_sequence
        values: dict[str, float | None] = {"restarts": float(len(self._restarts_s))}
        if self._source.status != "live":
            if self._heard_s is not None:
                values["silent"] = now_s - self._heard_s
            return values
        state = history.state
        values |= history.figures(None, WINDOW_S)
        flying = state.in_flight
        values["silent"] = 0.0
        values["step_in_flight"] = 0.0 if flying is None else seconds_of(flying)
        values["queue_age"] = queue_age_s(state)
        values |= waiting_figures(state)
        values["stalled_streams"] = float(num_stalled(state, history.slo))
        return values

    def _note_engine(self, now_s: float) -> None:
        info = self._source.history.info
        if info is not None and info.engine_id != self._engine_id:
            if self._engine_id is not None:
                self._restarts_s.append(now_s)
            self._engine_id = info.engine_id
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()


def queue_age_s(state: SessionState) -> float:
    """How long the oldest of the requests that were never admitted has waited, without pauses."""
    waiting = [each for each in state.requests.values() if each.status == "waiting"]
    arrivals = [each.arrival_ns for each in waiting if not each.is_partial]
    if not arrivals:
        return 0.0
    paused_ns = state.pauses.within(min(arrivals), state.time_ns)
    return max(0, state.time_ns - min(arrivals) - paused_ns) / 1e9


def waiting_figures(state: SessionState) -> dict[str, float | None]:
    """How many requests wait for what, by the figure's name; None if the engine does not say."""
    reasons = state.waiting_reasons
    names = [f"waiting_{reason}" for reason in (*WAITING_FOR, "blocks")]
    if reasons is None:
        return dict.fromkeys(names)
    counts = {f"waiting_{reason}": count for reason, count in reasons.items()}
    for name in ("waiting_kv_blocks", "waiting_encoder"):
        if name in counts:
            counts[name] += reasons.get("queued", 0)
    waiting = [each for each in state.requests.values() if each.status in ("waiting", "preempted")]
    counts["waiting_priority"] = sum(each.held == "priority" for each in waiting)
    counts["waiting_blocks"] = sum(each.num_blocks for each in waiting)
    if "policy" not in state.knobs:
        names.remove("waiting_priority")  # the engine does not say who goes ahead
    return {name: float(counts.get(name, 0)) for name in names}


def num_stalled(state: SessionState, slo: SLO) -> int:
    """Number of requests whose next token is later than the service level allows."""
    if state.state == "paused":
        return 0
    num_late = 0
    for each in state.requests.values():
        if each.status == "finished" or each.is_partial:
            continue
        is_first = each.last_token_ns is None
        since_ns = each.arrival_ns if each.last_token_ns is None else each.last_token_ns
        bound_ms = slo.ttft_ms if is_first else slo.itl_ms
        late_ns = state.time_ns - since_ns - bound_ms * 1e6
        num_late += late_ns > 0 and late_ns > state.pauses.within(since_ns, state.time_ns)
    return num_late
