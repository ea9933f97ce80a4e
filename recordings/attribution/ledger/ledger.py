"""`Ledger`: admissions and preemptions of a session, from its records alone.

Time in the queue is charged from one scheduling to the next, to what blocked the queue in the
first of the two.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stepscope.engine.protocol.wire import (
    Aborted,
    Admitted,
    Arrived,
    BatchRow,
    EngineInfo,
    EngineStatus,
    Finished,
    Mark,
    Phase,
    Preempted,
    RequestEvent,
    RequestView,
    RowFlag,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.attribution.ledger.preemptions import (
    Preemption,
    PreemptionStatus,
    beneficiaries,
    lost_between,
)
from stepscope.recordings.attribution.ledger.queue import QueueWait, in_order
from stepscope.recordings.attribution.open_waits import blocking_reason
from stepscope.recordings.state.pauses import Pauses
from stepscope.recordings.state.session import SessionState

MAX_ADMITTED = 1000  # the longest waits that have ended, of those kept

_DECODE, _RECOMPUTE = int(Phase.DECODE), int(Phase.RECOMPUTE)
_LAST_CHUNK = int(RowFlag.LAST_CHUNK)


class RecomputeTax(NamedTuple):
    """What preemptions cost a session. None is unknown.

    Attributes:
        num_tokens: computed in all, and `step_ns` is the time of all steps.
    """

    num_preemptions: int
    num_lost: int | None
    num_recomputed: int | None
    num_tokens: int
    recompute_ns: float | None
    step_ns: int

    @property
    def token_share(self) -> float | None:
        if self.num_recomputed is None or not self.num_tokens:
            return None
        return self.num_recomputed / self.num_tokens

    @property
    def time_share(self) -> float | None:
        if self.recompute_ns is None or not self.step_ns:
            return None
        return self.recompute_ns / self.step_ns


@dataclass(slots=True)
class _Waiting:
    """A request in the queue; `before` is what the queue had waited for before it came."""

    request_id: int
    client_id: str
    num_prompt_tokens: int
    was_preempted: bool
    since_ns: int | None
    before: dict[str, int]


class Ledger:
    """Takes the messages of a session in order.

    Args:
        state: right before the first message.

    Attributes:
        preemptions: all, oldest first; some may have begun before the first message.
        num_admitted: waits that ended in an admission.
        publishes_requests: whether the engine says who is in its steps.
    """

    def __init__(self, state: SessionState) -> None:
        self.preemptions: list[Preemption] = []
        self.num_steps = self.num_admitted = 0
        self.first_ns: int | None = None  # start of the first step
        self.publishes_requests = True
        self._state = state.copy()
        self._state.blocks = None
        self._pauses = Pauses(state)
        self._needs_snapshot = state.info is None
        self._waiting: dict[int, _Waiting] = {}
        self._open: dict[int, list[Preemption]] = {}  # without a token since, by request
        self._longest: list[tuple[int, int, QueueWait]] = []  # a heap
        self._spent: dict[str, int] = {}  # what the queue waited for so far, in ns
        self._reason = ""  # since the last scheduling
        self._scheduled_ns = state.time_ns
        self._num_tokens = self._step_ns = 0
        self._adopt()

    def take(self, message: Telemetry, after_gap: bool = False) -> None:
        """The next message; `after_gap`: some before it are missing."""
        if isinstance(message, Mark):
            return
        self._needs_snapshot |= after_gap
        self._pauses.take(message)
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and self._is_another(info):
            self._forget()
        if isinstance(message, Snapshot):
            if self._needs_snapshot:
                self._needs_snapshot = False
                self._state.apply(message)
                self._adopt()
        elif isinstance(message, StepRecord):
            self._take_step(message)
            self._state.apply(message)
        else:
            if isinstance(message, EngineStatus):
                self._take_events(message.events, message.time_ns, None, {})
            self._state.apply(message)
            if isinstance(message, EngineInfo):
                self._adopt()
        self._state.blocks = None

    # Results

    @property
    def info(self) -> EngineInfo | None:
        return self._state.info

    @property
    def last_step(self) -> int:
        return self._state.step

    @property
    def now_ns(self) -> int:
        """Engine time of the last message."""
        return self._state.time_ns

    def waiting(self) -> list[QueueWait]:
        """Who waits after the last message, in the order of the queue."""
        views = self._state.requests
        queue = in_order(
            [views[each] for each in self._waiting if each in views],
            {each: wait.since_ns for each, wait in self._waiting.items() if wait.was_preempted},
            self._state.knobs,
        )
        now = self._spent.copy()
        self._charge(now, self._scheduled_ns, self.now_ns, self._reason)
        return [
            _stay(self._waiting[view.request_id], now, None, None, len(queue) - 1 - place)
            for place, view in enumerate(queue)
        ]

    def admitted(self) -> list[QueueWait]:
        """The waits that have ended, the longest first, at most `MAX_ADMITTED`."""
        return [wait for _, _, wait in sorted(self._longest, reverse=True)]

    def tax(self) -> RecomputeTax:
        """What the preemptions cost."""
        lost = [each.num_lost for each in self.preemptions if each.step is not None]
        knows = self.publishes_requests
        return RecomputeTax(
            len(lost),
            None if None in lost or not knows else sum(each or 0 for each in lost),
            sum(each.num_recomputed for each in self.preemptions) if knows else None,
            self._num_tokens,
            sum(each.recompute_ns for each in self.preemptions) if knows else None,
            self._step_ns,
        )

    # Steps

    def _take_step(self, record: StepRecord) -> None:
        start_ns = record.schedule_start_ns
        self.num_steps += 1
        if self.first_ns is None:
            self.first_ns = start_ns
        self._charge(self._spent, self._scheduled_ns, start_ns, self._reason)
        self._scheduled_ns = max(self._scheduled_ns, start_ns)
        self._reason = blocking_reason(record)
        if record.events:
            is_preempting = any(isinstance(event, Preempted) for event in record.events)
            takers = beneficiaries(record, self._state) if is_preempting else {}
            self._take_events(record.events, start_ns, record.step, takers)
        num_tokens = record.num_prefill_tokens + record.num_decode_tokens
        step_ns = max(0, record.tokens_ns - start_ns)
        self._num_tokens += num_tokens
        self._step_ns += step_ns
        if record.batch is None:
            self.publishes_requests = False
        elif self._open or record.num_prefill_tokens:
            for row in record.batch:
                if row.phase == _RECOMPUTE or row.request_id in self._open:
                    self._recompute(row, step_ns / max(1, num_tokens))
        for event in record.events:
            if isinstance(event, Finished):
                self._end(event.request_id, record.tokens_ns)

    def _recompute(self, row: BatchRow, token_ns: float) -> None:
        preemptions = self._open.get(row.request_id)
        if preemptions is None:  # it was preempted before the first message
            view = self._state.requests.get(row.request_id)
            preemptions = [self._unseen(view, row.request_id)]
        end = row.start + row.num_tokens
        for each, number in zip(
            preemptions, lost_between(preemptions, row.start, end), strict=True
        ):
            if number:
                each.num_recomputed += number
                each.num_steps += 1
                each.recompute_ns += number * token_ns
        is_last = row.phase == _DECODE or bool(row.flags & _LAST_CHUNK)
        self._note_computed(row.request_id, end, is_last=is_last)

    def _note_computed(self, request_id: int, end: int, *, is_last: bool) -> None:
        """A request has so many tokens in its KV cache again; `is_last`: all that it can have."""
        for each in self._open.get(request_id, ()):
            is_back = is_last if each.num_lost is None else end >= each.num_lost
            each.status = "back" if is_back else "recomputes"
        if is_last:
            self._open.pop(request_id, None)

    # Events

    def _take_events(
        self,
        events: Iterable[RequestEvent],
        time_ns: int,
        step: int | None,
        takers: dict[int, int | None],
    ) -> None:
        for event in events:
            request_id = event.request_id
            if isinstance(event, Arrived):
                wait = _Waiting(
                    request_id, event.client_id, event.num_prompt_tokens, False, event.time_ns, {}
                )
                self._begin_wait(wait, time_ns)
            elif isinstance(event, Preempted):
                self._preempt(event, time_ns, step, takers.get(request_id))
            elif isinstance(event, Admitted):
                self._end_wait(request_id, time_ns, step)
                self._resume(event, time_ns)
            elif isinstance(event, Aborted) or (isinstance(event, Finished) and step is None):
                self._end(request_id, time_ns)

    def _end(self, request_id: int, time_ns: int) -> None:
        self._end_wait(request_id, time_ns, None)
        _leave_as(self._open.pop(request_id, ()), "ended")

    def _preempt(
        self, event: Preempted, time_ns: int, step: int | None, beneficiary: int | None
    ) -> None:
        view = self._state.requests.get(event.request_id)
        preemption = Preemption(
            event.request_id,
            "" if view is None else view.client_id,
            step,
            time_ns,
            event.reason,
            event.num_blocks,
            beneficiary,
            None if view is None else view.num_computed_tokens,
        )
        self.preemptions.append(preemption)
        before = self._open.setdefault(event.request_id, [])
        _leave_as(before, "waits")
        before.append(preemption)
        num_prompt = 0 if view is None else view.num_prompt_tokens
        wait = _Waiting(event.request_id, preemption.client_id, num_prompt, True, time_ns, {})
        self._begin_wait(wait, time_ns)

    def _resume(self, event: Admitted, time_ns: int) -> None:
        """A request was admitted; what the prefix cache still has need not be computed again."""
        preemptions = self._open.get(event.request_id)
        if preemptions is None:
            return
        num_cached = event.num_cached_tokens
        for each, number in zip(preemptions, lost_between(preemptions, 0, num_cached), strict=True):
            if each.num_lost is not None:
                each.num_from_cache += number
            if each.waited_ns is None and each.time_ns is not None:
                each.waited_ns = max(0, time_ns - each.time_ns)
        self._note_computed(event.request_id, num_cached, is_last=False)

    def _unseen(self, view: RequestView | None, request_id: int) -> Preemption:
        """A preemption before the first message."""
        client_id = "" if view is None else view.client_id
        preemption = Preemption(request_id, client_id)
        self.preemptions.append(preemption)
        self._open[request_id] = [preemption]
        return preemption

    # The queue

    def _begin_wait(self, wait: _Waiting, now_ns: int) -> None:
        """A request waits from now on, or since earlier: then it waited for a step to end."""
        wait.before = self._spent.copy()
        if wait.since_ns is not None:
            self._charge(wait.before, now_ns, wait.since_ns, self._reason)
            self._charge(wait.before, wait.since_ns, now_ns, "step", sign=-1)
        self._waiting[wait.request_id] = wait

    def _end_wait(self, request_id: int, time_ns: int, step: int | None) -> None:
        wait = self._waiting.pop(request_id, None)
        if wait is None:
            return
        self.num_admitted += step is not None
        stay = _stay(wait, self._spent, time_ns, step, len(self._waiting))
        waited_ns = stay.waited_ns(time_ns)
        if waited_ns is None:
            return
        entry = waited_ns, -request_id, stay
        if len(self._longest) < MAX_ADMITTED:
            heapq.heappush(self._longest, entry)
        else:
            heapq.heappushpop(self._longest, entry)

    def _charge(
        self, spent: dict[str, int], begin_ns: int, end_ns: int, reason: str, sign: int = 1
    ) -> None:
        """Add a stretch of time to what was waited for; nothing if it is none."""
        if begin_ns >= end_ns:
            return
        paused_ns = self._pauses.within(begin_ns, end_ns)
        spent[reason] = spent.get(reason, 0) + sign * (end_ns - begin_ns - paused_ns)
        if paused_ns:
            spent["paused"] = spent.get("paused", 0) + sign * paused_ns

    def _is_another(self, info: EngineInfo) -> bool:
        return self.info is not None and self.info.engine_id != info.engine_id

    def _forget(self) -> None:
        """The engine was started anew."""
        for preemptions in self._open.values():
            _leave_as(preemptions, "unknown")
        self._open, self._waiting = {}, {}
        self._state, self._pauses = SessionState(), Pauses()
        self._scheduled_ns, self._needs_snapshot = 0, True

    def _adopt(self) -> None:
        """Begin with the requests of the state; what is not in it has ended unseen."""
        views = self._state.requests
        self._scheduled_ns = self._scheduled_ns or self._state.time_ns
        out = {each for each, view in views.items() if view.status in ("waiting", "preempted")}
        for request_id in [each for each in self._waiting if each not in out]:
            del self._waiting[request_id]
        gone = [
            each for each in self._open if each not in views or views[each].status == "finished"
        ]
        for request_id in gone:
            _leave_as(self._open.pop(request_id), "unknown")
        for request_id in sorted(out - set(self._waiting)):
            view = views[request_id]
            is_out = view.status == "preempted"
            since_ns = None if is_out or view.is_partial else view.arrival_ns
            wait = _Waiting(
                request_id, view.client_id, view.num_prompt_tokens, is_out, since_ns, {}
            )
            self._begin_wait(wait, self._scheduled_ns)
            if is_out and request_id not in self._open:
                self._unseen(view, request_id)


def _leave_as(preemptions: Iterable[Preemption], status: PreemptionStatus) -> None:
    """What becomes of preemptions whose tokens are not all there again."""
    for each in preemptions:
        if each.status != "back":
            each.status = status


def _stay(
    wait: _Waiting, spent: dict[str, int], end_ns: int | None, step: int | None, num_behind: int
) -> QueueWait:
    """A wait, and what the queue waited for meanwhile."""
    reasons = {each: ns - wait.before.get(each, 0) for each, ns in spent.items()}
    reasons |= {each: -ns for each, ns in wait.before.items() if each not in spent}
    return QueueWait(
        wait.request_id,
        wait.client_id,
        wait.num_prompt_tokens,
        wait.was_preempted,
        wait.since_ns,
        end_ns,
        step,
        {each: ns for each, ns in reasons.items() if ns > 0},
        num_behind,
    )
