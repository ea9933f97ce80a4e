"""`RecentRun`: the last minute of a session in memory, as advice looks at a run."""

from collections.abc import Mapping

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.history.history_view import HistoryView
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.series.limits import Limit
from stepscope.recordings.state.session import SessionState

_WINDOW_S = 60.0
_MOST_LATE_STEPS = 256  # that are looked at


class RecentRun:
    """The minute up to the step of a state. Implements `Run`."""

    def __init__(self, history: HistoryView, state: SessionState) -> None:
        self.slo = history.slo
        self._history = history
        self._end_ns = state.time_ns
        self._start_ns = state.time_ns - round(_WINDOW_S * 1e9)
        changed = {
            name
            for each in history.knob_changes
            if self._start_ns < each.time_ns <= self._end_ns
            for name in each.new
        }
        self.knob_values: Mapping[str, list[KnobValue]] = {
            name: [value] for name, value in state.knobs.items() if name not in changed
        }

    @property
    def limited(self) -> Mapping[Limit, Sums]:
        return self._history.windows.limited(self._end_ns, _WINDOW_S)

    @property
    def share_late_beside_prefill(self) -> float:
        """See `Side`; of a minute with very many late tokens, only the last of them count."""
        history, num_late = self._history, 0
        for each in history.windows.breaches(history.step_at(self._end_ns), _MOST_LATE_STEPS):
            if each.kind == "ITL" and each.time_ns > self._start_ns:
                late = history.stall(each.step)
                is_beside = late is not None and late.main and late.main.cause == "prefill"
                num_late += each.num_tokens if is_beside else 0
        return num_late / max(1, history.latency(self._end_ns).itl.num_samples)

    def figures(self) -> dict[str, float | None]:
        return self._history.figures(self._end_ns, _WINDOW_S)
