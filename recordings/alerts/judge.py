"""`Judge`: decides which rules fire, by what `Meter` measures on a live source."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from stepscope.recordings.alerts.rule import WAITING_FOR, Rule
from stepscope.recordings.history.source import Source
from stepscope.recordings.state.audit_text import seconds_of
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState

WINDOW_S = 10.0  # window of the figures, and of the restarts


class Meter:
    """Measures the figures of one source for rules. Belongs to one thread."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._heard_s: float | None = None  # when the newest message came
        self._last_sequence: int | None = None  # its number
        self._engine_id: str | None = None
        self._restarts_s: deque[float] = deque()

    def measure(self) -> Mapping[str, float | None]:
        """Return name -> value, None without samples; what cannot be measured now is not there."""
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
        values |= history.windows.figures(None, WINDOW_S)
        values |= waiting_figures(state)
        flying = state.in_flight
        return values | {
            "silent": 0.0,
            "step_in_flight": 0.0 if flying is None else seconds_of(flying),
            "queue_age": queue_age_s(state),
            "stalled_streams": float(num_stalled(state, history.slo)),
        }

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
        since_ns, bound_ms = each.last_token_ns, slo.itl_ms
        if since_ns is None:
            since_ns, bound_ms = each.arrival_ns, slo.ttft_ms
        late_ns = state.time_ns - since_ns - bound_ms * 1e6
        num_late += late_ns > 0 and late_ns > state.pauses.within(since_ns, state.time_ns)
    return num_late


CALM_S = 10.0  # firing ends after so long without holding, or after the rule's `for` if longer


class RuleChange(NamedTuple):
    """A rule has begun or stopped firing."""

    rule: Rule
    is_firing: bool
    value: float | None  # that made it fire; at the end, the worst
    seconds: float = 0.0  # at the end, from when it fired until its condition was not true any more

    @property
    def text(self) -> str:
        if self.is_firing:
            return self.rule.said(self.value)
        return f"{self.rule.said(self.value)} at worst, over after {self.seconds:.0f} s"


class RuleWatch:
    """Follows one rule over time."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.value: float | None = None  # the newest value of the rule's figure; None if unknown
        self.worst: float | None = None  # since the rule began to fire; None if it does not fire
        self.fired_s: float | None = None  # when the rule began to fire; None if it does not fire
        self._held_since_s: float | None = None
        self._calm_since_s: float | None = None

    @property
    def state(self) -> Literal["unknown", "ok", "pending", "firing"]:
        if self.fired_s is not None:
            return "firing"
        if self.value is None:
            return "unknown"
        return "ok" if self._held_since_s is None else "pending"

    @property
    def holds(self) -> bool:
        """Whether the rule's condition was true at the last measurement."""
        return self._held_since_s is not None

    def apply(self, values: Mapping[str, float | None], now_s: float) -> RuleChange | None:
        """Process the next measurement, name -> value; return a change, if firing begins or stops.

        A rule whose figure has no samples (None) does not hold, and so it may stop firing. If the
        figure cannot be measured, and is not there, it begins and stops nothing.
        """
        rule = self.rule
        self.value = value = values.get(rule.figure)
        if rule.figure not in values:
            return None
        if value is None or not rule.bound.holds(value):
            return self._calm(now_s)
        self._calm_since_s = None
        if self._held_since_s is None:
            self._held_since_s = now_s
        if self.fired_s is not None:
            worse = max if rule.bound.relation in (">", ">=") else min
            self.worst = value if self.worst is None else worse(self.worst, value)
        elif now_s - self._held_since_s >= rule.for_s:
            self.fired_s, self.worst = now_s, value
            return RuleChange(rule, True, value)
        return None

    def _calm(self, now_s: float) -> RuleChange | None:
        self._held_since_s = None
        if self.fired_s is None:
            return None
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < max(CALM_S, self.rule.for_s):
            return None
        change = RuleChange(self.rule, False, self.worst, self._calm_since_s - self.fired_s)
        self.fired_s = self.worst = self._calm_since_s = None
        return change


class Judge:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.watches = [RuleWatch(rule) for rule in rules]

    def apply(self, values: Mapping[str, float | None], now_s: float) -> list[RuleChange]:
        """Process the next measurement; return a change for each rule that begins or ends."""
        changes = (watch.apply(values, now_s) for watch in self.watches)
        return [change for change in changes if change is not None]

    @property
    def firing(self) -> list[RuleWatch]:
        return [watch for watch in self.watches if watch.fired_s is not None]
