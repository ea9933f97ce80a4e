"""`Side`: one of two compared runs, summed up message by message. It reads no clock and no file.

Its memory is bounded, however many steps a run has.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    EngineInfo,
    EngineStatus,
    KnobsChanged,
    KnobValue,
    Mark,
    RequestView,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.causes import Cause, Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.compare.side.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoints
from stepscope.recordings.compare.side.requests import MAX_REQUESTS, RequestRun
from stepscope.recordings.compare.side.slices import WaitSlices
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.session.sums import Sums, sums_between
from stepscope.recordings.session.totals import RunTotals
from stepscope.recordings.session.waits import WaitSums
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.series.distribution import LatencySpread
from stepscope.recordings.state.series.finished import KeptLevels, RequestWatch
from stepscope.recordings.state.series.latency import SLO, LatencyKind
from stepscope.recordings.state.series.limits import Limit
from stepscope.recordings.state.session import SessionState

Kind: TypeAlias = Literal["TTFT", "ITL"]

MAX_VALUES = 8  # most values kept of a knob, the last ones


class Follower:
    """Follows the waits and the requests of a compared run, and those before it.

    A wait belongs to the run in which it ends, and a request to the one in which it finishes. Those
    that were in progress at the beginning of a run must count: else a run that begins with a queue
    would lose its longest waits and keep only short ones. So it is fed the messages from the
    arrival of the oldest request on. What is still in progress at the end of a run does not belong
    to that run. So each wait and each request counts once.

    Args:
        slo: a longer wait is late.
        state: the state right before the first message; not changed.
        since_ns: engine time from which all pauses are known; None: the time of `state`. Waits that
            began earlier are left out, because an unknown part of them, perhaps hours, may be a
            pause by the operator.
    """

    def __init__(self, slo: SLO, state: SessionState, since_ns: int | None = None) -> None:
        baseline = Baseline()  # learns while it reads: a run is read once and may still grow
        self.explainer = Explainer(
            slo.itl_ms * 1e6,
            slo.ttft_ms * 1e6,
            state=state,
            since_ns=since_ns,
            baseline=baseline,
            learns=baseline,
        )
        self._watch = RequestWatch(0.0)
        self._watch.begin(self.state)

    @property
    def state(self) -> SessionState:
        """The state after the last message."""
        return self.explainer.state

    def take(self, message: Telemetry, after_gap: bool = False) -> Outcome | None:
        """Process the next message. Returns the outcome of a step; None if it is repeated.

        Args:
            after_gap: whether messages before it are missing.
        """
        if after_gap:
            self._watch.begin(self.state)
        outcome = self.explainer.take(message, after_gap)
        if outcome is not None and isinstance(message, StepRecord):
            self._watch.take(outcome, self.state, message.tokens_ns)
        return outcome


def oldest_arrival(views: Iterable[RequestView]) -> int | None:
    """The oldest known arrival among the requests that have not ended; None without any."""
    return min(
        (view.arrival_ns for view in views if view.status != "finished" and not view.is_partial),
        default=None,
    )


class Side:
    """One of two compared runs, as read so far.

    Args:
        name: the name shown to people.
        slo: the service levels, the same for both runs.
        past: the state right before the first message; waits in progress then are left out. Or a
            follower that was fed the messages before it.

    Attributes:
        lock: held while a message is processed. Readers of columns or tables must hold it too.
        version: grows with every message.
        is_cut: whether a later step followed the last one. What happened between them counts there.
        origin_ns: engine time at which the first step began; None before it.
        had_cache: whether the prefix cache may have held something before the first message.
        knob_values: for each knob, the values it had, in order (the last `MAX_VALUES`).
        cause_ns: time of each cause in the late waits for first (or next) tokens.
        num_late: number of late waits that have this cause as their largest.
    """

    def __init__(self, name: str, slo: SLO, past: Follower | SessionState) -> None:
        self.name = name
        self.slo = slo
        self.lock = threading.Lock()
        self.version = 0
        self.is_cut = False
        self.origin_ns: int | None = None
        self.points = StepPoints()
        self.totals = RunTotals()
        levels: dict[LatencyKind, float] = {"ttft": slo.ttft_ms * 1e6, "itl": slo.itl_ms * 1e6}
        self._wait_sums = WaitSums(levels)
        self.waits = self._wait_sums.of
        self.kept = KeptLevels(0, 0)
        self.sliced = WaitSlices()
        self.requests: dict[int, RequestRun] = {}
        self._follower = Follower(slo, past) if isinstance(past, SessionState) else past
        self._follower.explainer.late.clear()  # those waits ended before this run
        self._state = state = self._follower.state
        self.had_cache = state.kv is None or state.kv.cached + state.kv.used > 0
        self.num_unlisted = 0  # requests beyond the first MAX_REQUESTS
        self.knob_values: dict[str, list[KnobValue]] = {}
        self.cause_ns: dict[tuple[Kind, Cause], int] = {}
        self.num_late: dict[tuple[Kind, Cause], int] = {}
        self._in_force = dict(state.knobs)  # knob values at the last step, or before the first
        self._coming: list[KnobsChanged] = []  # changes that are not in force yet
        for view in state.requests.values():
            if view.status != "finished" and not view.is_partial:
                self._list(view, was_there=True)

    @property
    def info(self) -> EngineInfo | None:
        return self._state.info

    @property
    def workload(self) -> str | None:
        return self._state.workload

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return self.points.end_ns / 1e9

    @property
    def limited(self) -> Mapping[Limit, Sums]:
        """For each limit, the sums over the steps that had it."""
        return self.totals.limited

    @property
    def share_late_beside_prefill(self) -> float:
        """The share of gaps between tokens that were late mainly due to prompts of others."""
        return self.num_late.get(("ITL", "prefill"), 0) / max(1, self.waits["itl"].count)

    def sums(self) -> Sums:
        """The sums from which figures are computed. The caller must hold `lock`."""
        between = None if self.is_cut else self._state.between
        return replace(self.totals.sums + sums_between(between), span_ns=self.points.end_ns)

    def spreads(self) -> dict[LatencyKind, LatencySpread]:
        """The percentiles of all latencies. The caller must hold `lock`."""
        return self._wait_sums.spreads()

    def figures(self) -> dict[str, float | None]:
        """All figures of the run. The caller must hold `lock`, or have read the whole run."""
        return figures_of(self.sums(), self.spreads(), self.kept)

    def take(self, message: Telemetry, after_gap: bool = False) -> None:
        """Process the next message of the run.

        Args:
            after_gap: whether messages before it are missing.
        """
        with self.lock:
            self.version += 1
            self._take(message, after_gap)

    def _take(self, message: Telemetry, after_gap: bool) -> None:
        if isinstance(message, Mark):
            self.points.flag(message.step, MARKED)
            return
        outcome = self._follower.take(message, after_gap)
        self._count_causes()
        if isinstance(message, KnobsChanged):
            self._coming.append(message)
        elif isinstance(message, Snapshot):
            self._in_force, self._coming = dict(message.knobs), []
        if isinstance(message, StepRecord):
            if outcome is not None:
                self._take_step(message, outcome, after_gap)
        elif isinstance(message, EngineStatus):
            self._take_events(message, message.time_ns)

    # Steps

    def _take_step(self, record: StepRecord, outcome: Outcome, after_gap: bool) -> None:
        now_ns = record.tokens_ns
        if self.origin_ns is None:
            self.origin_ns = record.schedule_start_ns
        is_one_step = not self._state.is_summed_up
        self._wait_sums.add(record, outcome, is_one_step=is_one_step)
        finished = self._take_finished(outcome)
        for request_id, gap_ns in outcome.longer:
            run = self.requests.get(request_id)
            if run is not None and gap_ns > (run.worst_itl_ns or -1):
                run.worst_itl_ns, run.worst_step = gap_ns, record.step
        self._take_events(record, now_ns)
        for request_id, ttft_ns in outcome.ttft_ns:
            run = self.requests.get(request_id)
            if run is not None:
                run.ttft_ns, run.first_token_step = ttft_ns, record.step
        flags = self._note_knobs(record.step) | self._flags(outcome, after_gap)
        start_ns, end_ns = self._since(record.schedule_start_ns), self._since(now_ns)
        num_rows = None if record.batch is None else len(record.batch)
        applied = AppliedStep(0, record, outcome, num_rows, is_one_step)
        self.totals.append(applied, end_ns, finished)
        self.sliced.take(record, outcome, max(start_ns, end_ns), is_one_step=is_one_step)
        self.points.append(
            record.step,
            start_ns,
            max(start_ns, end_ns),
            record.num_prefill_tokens,
            record.num_decode_tokens,
            record.token_budget,
            num_rows,
            record.num_waiting,
            outcome.max_gap_ns,
            flags,
        )

    def _since(self, time_ns: int) -> int:
        """Nanoseconds from the start of the run to `time_ns`. Never less than at the last step."""
        return max(time_ns - (self.origin_ns or 0), self.points.end_ns)

    def _take_finished(self, outcome: Outcome) -> list[bool]:
        """For each request that finished in a step, whether it met the service levels."""
        slo = self.slo
        kept = [each.keeps(slo.ttft_ms * 1e6, slo.itl_ms * 1e6) for each in outcome.finished]
        self.kept = KeptLevels(self.kept.num_judged + len(kept), self.kept.num_kept + sum(kept))
        return kept

    def _flags(self, outcome: Outcome, after_gap: bool) -> int:
        slo = self.slo
        late = (outcome.max_gap_ns or 0) > slo.itl_ms * 1e6 or any(
            ns > slo.ttft_ms * 1e6 for _, ns in outcome.ttft_ns
        )
        flags = (PREEMPTED if outcome.num_preempted else 0) | (LATE if late else 0)
        return flags | (LOST if after_gap else 0)

    # Requests

    def settle(self) -> None:
        """Update the number of output tokens of the requests that are still live."""
        for request_id, view in self._state.requests.items():
            run = self.requests.get(request_id)
            if run is not None and view.status != "finished":
                run.num_output_tokens = view.num_output_tokens

    def _take_events(self, message: StepRecord | EngineStatus, time_ns: int) -> None:
        views = self._state.requests
        for event in message.events:
            view = views.get(event.request_id)
            if view is None:
                continue
            if isinstance(event, Arrived):
                self._list(view)
            run = self.requests.get(event.request_id)
            if run is None:
                continue
            if isinstance(event, Admitted):
                run.num_cached_tokens = view.num_cached_tokens
            run.num_preemptions = view.num_preemptions
            if view.status == "finished":
                run.end_ns = time_ns
                run.num_output_tokens = view.num_output_tokens
                run.has_all = view.finish_reason in ("stop", "length")

    def _list(self, view: RequestView, *, was_there: bool = False) -> None:
        if view.request_id in self.requests:
            return
        if len(self.requests) >= MAX_REQUESTS:
            self.num_unlisted += 1
            return
        is_admitted = was_there and (view.status == "running" or view.num_preemptions > 0)
        self.requests[view.request_id] = RequestRun(
            view.request_id,
            view.client_id,
            view.num_prompt_tokens,
            view.arrival_ns,
            num_output_tokens=view.num_output_tokens,
            num_preemptions=view.num_preemptions,
            num_cached_tokens=view.num_cached_tokens if is_admitted else None,
            max_tokens=view.max_tokens,
            was_there=was_there,
            was_queued=was_there and view.status in ("waiting", "preempted"),
        )

    # Rest

    def _note_knobs(self, step: int) -> int:
        """Add the knob values that apply to a step. Returns `KNOB` if any changed, else 0."""
        due = [change for change in self._coming if change.effective_step <= step]
        if due:
            self._coming = [change for change in self._coming if change.effective_step > step]
            for change in due:
                self._in_force |= change.new
        elif self.points.num_steps:
            return 0
        for name, value in self._in_force.items():
            values = self.knob_values.setdefault(name, [])
            if not values or values[-1] != value:
                values.append(value)
                del values[:-MAX_VALUES]
        return KNOB if any(change.new for change in due) else 0

    def _count_causes(self) -> None:
        late = self._follower.explainer.late
        if not late:
            return
        # Requests that decode side by side share the pieces of their waits.
        alike: dict[tuple[int, Kind], list[Late]] = {}
        for each in late:
            alike.setdefault((id(each.pieces), each.kind), []).append(each)
        for group in alike.values():
            first, number = group[0], len(group)
            if first.is_excused:
                continue
            key = first.kind, first.cause
            self.num_late[key] = self.num_late.get(key, 0) + number
            for piece in first.pieces:
                key = first.kind, piece.cause
                self.cause_ns[key] = self.cause_ns.get(key, 0) + number * piece.ns
        late.clear()
