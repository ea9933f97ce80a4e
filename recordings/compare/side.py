"""`Side`: one of two compared runs, summed up message by message. It reads no clock and no file.

Its memory is bounded, however many steps a run has.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.compare.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoints
from stepscope.recordings.compare.side_requests import MAX_REQUESTS, RequestRun
from stepscope.recordings.figures import figures_of
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.session.indexer import NewRows
from stepscope.recordings.session.steps import UNKNOWN
from stepscope.recordings.session.sums import Sums, sums_between
from stepscope.recordings.session.totals import RunSlices, RunTotals
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.latency_samples import RequestWatch
from stepscope.recordings.state.lazy_numpy import np
from stepscope.recordings.state.limits import Limit
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.session import SessionState

_MAX_VALUES = 8  # most values given of a knob, the last ones


# Values of knobs, and the first step with them, in order.
KnobChanges: TypeAlias = list[tuple[int, Mapping[str, KnobValue]]]


def knobs_between(changes: KnobChanges, first: int, last: int) -> dict[str, list[KnobValue]]:
    """For each knob, the values that it had in these steps, in order (the last few)."""
    found: dict[str, list[KnobValue]] = {}
    for step, values in changes:
        for name, value in values.items() if step <= last else ():
            known = found.get(name, [])
            if step <= first or not known:
                found[name] = [value]
            elif known[-1] != value:
                found[name] = [*known, value][-_MAX_VALUES:]
    return found


Kind: TypeAlias = Literal["TTFT", "ITL"]

_BLOCK_STEPS = 4096  # steps that are added to the sums at once, at most
_POINT_COLUMNS = (
    "num_prefill_tokens", "num_decode_tokens", "token_budget", "num_waiting",
)  # fmt: skip


class RunFollower:
    """Follows the waits and the requests of a compared run, and those before it.

    A wait belongs to the run in which it ends, a request to the one in which it finishes: so each
    counts once, and a run that begins with a queue keeps its longest waits. It is fed the messages
    from the arrival of the oldest request on.

    Args:
        state: the state right before the first message; not changed.
        since_ns: engine time from which all pauses are known; None: the time of `state`. Waits that
            began earlier are left out: an unknown part of them may be a pause by the operator.
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
        self.state = self.explainer.state
        self._watch = RequestWatch(0.0, self.state)

    def apply(self, message: wire.Telemetry, after_gap: bool = False) -> Outcome | None:
        """Process the next message. Returns the outcome of a step; None if it is repeated."""
        if after_gap:
            self._watch.begin(self.state)
        outcome = self.explainer.take(message, after_gap)
        if outcome is not None and isinstance(message, wire.StepRecord):
            self._watch.take(outcome, self.state, message.tokens_ns)
        return outcome


def oldest_arrival(views: Iterable[wire.RequestView]) -> int | None:
    """The oldest known arrival among the requests that have not ended; None without any."""
    return min(
        (view.arrival_ns for view in views if view.status != "finished" and not view.is_partial),
        default=None,
    )


class Side:
    """One of two compared runs, as read so far.

    Args:
        slo: the service levels, the same for both runs.
        past: the state right before the first message; waits in progress then are left out. Or a
            follower that was fed the messages before it.
    """

    def __init__(self, name: str, slo: SLO, past: RunFollower | SessionState) -> None:
        self.name = name
        self.slo = slo
        # Held while a message is processed. Readers of all else but figures must hold it too.
        self.lock = threading.RLock()
        self.version = 0  # grows with every message
        # Whether a later step followed the last one. What happened between them counts there.
        self.is_cut = False
        self.requests: dict[int, RequestRun] = {}
        self._totals = RunTotals(slo)
        self._slices = RunSlices(slo)
        self._points = StepPoints()
        self._new = NewRows()  # not in them yet
        self._lost: list[int] = []  # of these, places of steps before which messages are missing
        self._is_lost = False
        self._follower = RunFollower(slo, past) if isinstance(past, SessionState) else past
        self._follower.explainer.late.clear()  # those waits ended before this run
        self._state = state = self._follower.state
        # Whether the prefix cache may have held something before the first message.
        self.had_cache = state.kv is None or state.kv.cached + state.kv.used > 0
        self.num_unlisted = 0  # requests beyond the first MAX_REQUESTS
        # Time of each cause in the late waits, and the number of those with it as the largest.
        self.cause_ns: Counter[tuple[Kind, Cause]] = Counter()
        self.num_late: Counter[tuple[Kind, Cause]] = Counter()
        self._knobs: KnobChanges = [(-1, dict(state.knobs))]
        self._coming: list[wire.KnobsChanged] = []  # changes of which no step has a flag yet
        for view in state.requests.values():
            if view.status != "finished" and not view.is_partial:
                self._list(view, was_there=True)

    @property
    def info(self) -> wire.EngineInfo | None:
        return self._state.info

    @property
    def workload(self) -> str | None:
        return self._state.workload

    @property
    def totals(self) -> RunTotals:
        self._add_new()
        return self._totals

    @property
    def slices(self) -> RunSlices:
        self._add_new()
        return self._slices

    @property
    def points(self) -> StepPoints:
        self._add_new()
        return self._points

    @property
    def knob_values(self) -> Mapping[str, list[wire.KnobValue]]:
        """For each knob, the values it had, in order."""
        points = self.points
        if points.first_step is None or points.last_step is None:
            return {}
        return knobs_between(self._knobs, points.first_step, points.last_step)

    @property
    def limited(self) -> Mapping[Limit, Sums]:
        return self.totals.limited

    @property
    def share_late_beside_prefill(self) -> float:
        """The share of gaps between tokens that were late mainly due to prompts of others."""
        return self.num_late["ITL", "prefill"] / max(1, self.totals.waits.of["itl"].count)

    def sums(self) -> Sums:
        totals, between = self.totals, None if self.is_cut else self._state.between
        return totals.sums + sums_between(between)

    def figures(self) -> dict[str, float | None]:
        """All figures of the run. The caller must hold `lock`, or have read the whole run."""
        return figures_of(self.sums(), self.totals.waits.spreads(), self.totals.kept)

    def apply(self, message: wire.Telemetry, after_gap: bool = False) -> None:
        with self.lock:
            self.version += 1
            if isinstance(message, wire.Mark):
                self.points.flag(message.step, MARKED)
                return
            self._is_lost = self._is_lost or after_gap
            outcome = self._follower.apply(message, after_gap)
            self._count_causes()
            if isinstance(message, wire.KnobsChanged):
                self._coming.append(message)
                self._knobs.append((message.effective_step, message.new))
            elif isinstance(message, wire.Snapshot):
                self._knobs.append((message.step + 1, message.knobs))
            elif isinstance(message, wire.EngineStatus):
                self._apply_events(message, message.time_ns)
            elif isinstance(message, wire.StepRecord) and outcome is not None:
                self._apply_step(message, outcome)

    # Steps

    def _apply_step(self, record: wire.StepRecord, outcome: Outcome) -> None:
        is_one_step = not self._state.is_summed_up
        if self._is_lost:
            self._lost.append(len(self._new))
            self._is_lost = False
        self._new.append(AppliedStep(0, record, outcome, is_one_step))
        for request_id, gap_ns in outcome.longer:
            run = self.requests.get(request_id)
            if run is not None and gap_ns > (run.worst_itl_ns or -1):
                run.worst_itl_ns, run.worst_step = gap_ns, record.step
        self._apply_events(record, record.tokens_ns)
        for request_id, ttft_ns in outcome.ttft_ns:
            run = self.requests.get(request_id)
            if run is not None:
                run.ttft_ns, run.first_token_step = ttft_ns, record.step
        if len(self._new) >= _BLOCK_STEPS:
            self._add_new()

    def _add_new(self) -> None:
        """Add the new steps to the sums and to the points. Any thread may call it."""
        with self.lock:
            if len(self._new):
                rows, self._new = self._new.rows(), NewRows()
                lost, self._lost = self._lost, []
                self._add(rows, lost)

    def _add(self, rows: IndexRows, lost: list[int]) -> None:
        is_one_step = not self._state.is_summed_up
        times = self._totals.add(rows, is_one_step=is_one_step)
        self._slices.add(rows, times.ends_ns, is_one_step=is_one_step)
        names = ("step", "num_preempted", "max_itl_ns", "max_ttft_ns", *_POINT_COLUMNS)
        columns = {name: rows.steps().values(name) for name in names}
        steps, itl_ns = columns["step"], columns["max_itl_ns"]
        is_late = (itl_ns > self.slo.itl_ms * 1e6) | (
            columns["max_ttft_ns"] > self.slo.ttft_ms * 1e6
        )
        flags = PREEMPTED * (columns["num_preempted"] > 0) | LATE * is_late
        flags[lost] |= LOST
        due = [each for each in self._coming if each.effective_step <= steps[-1]]
        self._coming = [each for each in self._coming if each.effective_step > steps[-1]]
        flags[np.searchsorted(steps, [each.effective_step for each in due if each.new])] |= KNOB
        longest_us = np.where(itl_ns == UNKNOWN, UNKNOWN, itl_ns // 1000)
        durations_us = (times.ends_ns - times.starts_ns) // 1000
        numbers = [*(columns[name] for name in _POINT_COLUMNS), longest_us, durations_us]
        self._points.extend(np.array([steps, steps, *times, *numbers, flags]))

    # Requests

    def settle(self) -> None:
        """Update the number of output tokens of the requests that are still live."""
        for request_id, view in self._state.requests.items():
            run = self.requests.get(request_id)
            if run is not None and view.status != "finished":
                run.num_output_tokens = view.num_output_tokens

    def _apply_events(self, message: wire.StepRecord | wire.EngineStatus, time_ns: int) -> None:
        views = self._state.requests
        for event in message.events:
            view = views.get(event.request_id)
            if view is None:
                continue
            if isinstance(event, wire.Arrived):
                self._list(view)
            run = self.requests.get(event.request_id)
            if run is None:
                continue
            if isinstance(event, wire.Admitted):
                run.num_cached_tokens = view.num_cached_tokens
            run.num_preemptions = view.num_preemptions
            if view.status == "finished":
                run.end_ns = time_ns
                run.num_output_tokens = view.num_output_tokens
                run.has_all = view.finish_reason in ("stop", "length")

    def _list(self, view: wire.RequestView, *, was_there: bool = False) -> None:
        if view.request_id in self.requests:
            return
        if len(self.requests) >= MAX_REQUESTS:
            self.num_unlisted += 1
            return
        is_admitted = was_there and (view.status == "running" or view.num_preemptions > 0)
        self.requests[view.request_id] = RequestRun(
            view.request_id, view.client_id, view.num_prompt_tokens, view.arrival_ns,
            num_output_tokens=view.num_output_tokens, num_preemptions=view.num_preemptions,
            num_cached_tokens=view.num_cached_tokens if is_admitted else None,
            max_tokens=view.max_tokens, was_there=was_there,
            was_queued=was_there and view.status in ("waiting", "preempted"),
        )  # fmt: skip

    # Rest

    def _count_causes(self) -> None:
        late = self._follower.explainer.late
        for each in late:
            if not each.is_excused:
                self.num_late[each.kind, each.cause] += 1
                for piece in each.pieces:
                    self.cause_ns[each.kind, piece.cause] += piece.ns
        late.clear()
