"""`Ledger`: lists the admissions and preemptions of a session, from its records alone."""

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.queue import (
    Preemption,
    QueueWait,
    beneficiaries,
    in_order,
    lost_between,
)  # fmt: skip
from stepscope.recordings.session.sums import per, plus
from stepscope.recordings.state.session import SessionState

MAX_ADMITTED = 1000  # how many ended waits are kept, the longest ones
_DECODE, _RECOMPUTE = int(wire.Phase.DECODE), int(wire.Phase.RECOMPUTE)
_LAST_CHUNK = int(wire.RowFlag.LAST_CHUNK)


class RecomputeTax(NamedTuple):
    """How much of a session was spent on recomputing preempted requests. None is unknown."""

    num_preemptions: int
    num_lost: int | None
    num_recomputed: int | None
    num_tokens: int
    recompute_ns: float | None
    step_ns: int

    @property
    def token_share(self) -> float | None:
        return per(self.num_recomputed, self.num_tokens)

    @property
    def time_share(self) -> float | None:
        return per(self.recompute_ns, self.step_ns)


class Ledger:
    """Collects the admissions and preemptions in the messages of a session, fed in order.

    Args:
        state: the state right before the first message.
        baseline: finds slow steps; None: no step counts as slow.

    Attributes:
        explainer, state: after the last message.
        preemptions: all preemptions, oldest first; some may precede the first message.
    """

    def __init__(self, state: SessionState, baseline: Baseline | None = None) -> None:
        self.preemptions: list[Preemption] = []
        self.num_admitted = 0  # number of waits that ended in an admission
        self.publishes_requests = True  # whether the engine publishes the batches of its steps
        before = None if state.info is None else state
        self.explainer = Explainer(
            math.inf, math.inf, state=before, baseline=baseline, with_queue=True
        )
        self.state = self.explainer.state
        self._longest: list[tuple[int, int, QueueWait]] = []  # a heap
        self._open: dict[int, list[Preemption]] = {}  # by request: those since its last token
        self._num_tokens = self._step_ns = 0
        self._adopt()

    def take(self, message: wire.Telemetry, after_gap: bool = False) -> None:
        if self.state.is_replaced_by(message):
            self._open = {}
        elif isinstance(message, wire.StepRecord):
            if self.explainer.is_repeated(message):
                return
            self._take_step(message)
        elif isinstance(message, wire.EngineStatus):
            self._take_events(message.events, message.time_ns, None, {})
        self.explainer.take(message, after_gap)
        for wait in self.explainer.waits.queued:
            self._keep(wait)
        self.explainer.waits.queued.clear()
        if isinstance(message, wire.EngineInfo | wire.Snapshot):
            self._adopt()

    # Results

    def waiting(self) -> list[QueueWait]:
        """The waits of the requests still in the queue after the last message, in queue order."""
        waits, views = self.explainer.waits.waiting(), self.state.requests
        preempted_ns = {each: wait.since_ns for each, wait in waits.items() if wait.was_preempted}
        queue = in_order([views[each] for each in waits], preempted_ns, self.state.knobs)
        return [
            self._of(waits[view.request_id]._replace(num_behind=len(queue) - place))
            for place, view in enumerate(queue, 1)
        ]

    def admitted(self) -> list[QueueWait]:
        """The longest waits that have ended, longest first, at most `MAX_ADMITTED`."""
        return [wait for _, _, wait in sorted(self._longest, reverse=True)]

    def _of(self, wait: QueueWait) -> QueueWait:
        view = self.state.requests.get(wait.request_id)
        if view is None:
            return wait
        return wait._replace(client_id=view.client_id, num_prompt_tokens=view.num_prompt_tokens)

    def _keep(self, wait: QueueWait) -> None:
        self.num_admitted += wait.step is not None
        waited_ns = wait.waited_ns(self.state.time_ns)
        if waited_ns is not None:
            entry = waited_ns, -wait.request_id, self._of(wait)
            heapq.heappush(self._longest, entry)
            if len(self._longest) > MAX_ADMITTED:
                heapq.heappop(self._longest)

    def tax(self) -> RecomputeTax:
        lost = [each.num_lost for each in self.preemptions if each.step is not None]
        knows = self.publishes_requests
        return RecomputeTax(
            len(lost), plus(*lost) if knows else None,
            sum(each.num_recomputed for each in self.preemptions) if knows else None,
            self._num_tokens,
            sum(each.recompute_ns for each in self.preemptions) if knows else None, self._step_ns,
        )  # fmt: skip

    # Steps

    def _take_step(self, record: wire.StepRecord) -> None:
        start_ns = record.schedule_start_ns
        takers = beneficiaries(record, self.state)
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
            if isinstance(event, wire.Finished):
                self._open.pop(event.request_id, None)

    def _recompute(self, row: wire.BatchRow, token_ns: float) -> None:
        # A request of which no preemption was seen was preempted before the first message.
        preemptions = self._open.get(row.request_id) or [self._unseen(row.request_id)]
        end = row.start + row.num_tokens
        numbers = lost_between(preemptions, row.start, end)
        for each, number in zip(preemptions, numbers, strict=True):
            each.num_recomputed += number
            each.recompute_ns += number * token_ns
        if row.phase == _DECODE or row.flags & _LAST_CHUNK:
            self._open.pop(row.request_id, None)

    # Events

    def _take_events(
        self,
        events: Iterable[wire.RequestEvent],
        time_ns: int,
        step: int | None,
        takers: dict[int, int | None],
    ) -> None:
        for event in events:
            request_id = event.request_id
            if isinstance(event, wire.Preempted):
                self._preempt(event, time_ns, step, takers.get(request_id))
            elif isinstance(event, wire.Admitted):
                self._resume(event)
            elif isinstance(event, wire.Aborted) or (
                isinstance(event, wire.Finished) and step is None
            ):
                self._open.pop(request_id, None)

    def _preempt(
        self, event: wire.Preempted, time_ns: int, step: int | None, beneficiary: int | None
    ) -> None:
        view = self.state.requests.get(event.request_id)
        client_id = "" if view is None else view.client_id
        num_lost = None if view is None else view.num_computed_tokens
        preemption = Preemption(
            event.request_id, client_id, step, time_ns, event.reason, event.num_blocks, beneficiary,
            num_lost,
        )  # fmt: skip
        self.preemptions.append(preemption)
        self._open.setdefault(event.request_id, []).append(preemption)

    def _resume(self, event: wire.Admitted) -> None:
        """Lost tokens that are still in the prefix cache need not be computed again."""
        preemptions = self._open.get(event.request_id, [])
        numbers = lost_between(preemptions, 0, event.num_cached_tokens)
        for each, number in zip(preemptions, numbers, strict=True):
            each.num_from_cache += 0 if each.num_lost is None else number

    def _unseen(self, request_id: int) -> Preemption:
        """Add a preemption that happened before the first message, of which little is known."""
        view = self.state.requests.get(request_id)
        preemption = Preemption(request_id, "" if view is None else view.client_id)
        self.preemptions.append(preemption)
        self._open[request_id] = [preemption]
        return preemption

    def _adopt(self) -> None:
        """Take over the requests of the state; those missing there have ended unobserved."""
        views = self.state.requests
        live = {each for each, view in views.items() if view.status != "finished"}
        self._open = {each: held for each, held in self._open.items() if each in live}
        for request_id, view in sorted(views.items()):
            if view.status == "preempted" and request_id not in self._open:
                self._unseen(request_id)
