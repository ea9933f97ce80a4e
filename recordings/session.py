"""`SessionState`: what an observer knows of an engine after a message. A pure reducer.

It owns its requests and block arrays and reads nothing but messages: no clock, no socket, no file.
Order and gaps are the business of whoever feeds it; whatever valid message comes, in whatever
order, it takes without raising. What it missed it shows as partial, never as made up.
"""

import copy
from array import array
from collections import deque
from dataclasses import dataclass, field

from stepscope.engine.wire import (
    Aborted,
    Admitted,
    Arrived,
    BatchRow,
    EngineInfo,
    EngineState,
    EngineStatus,
    Finished,
    FirstToken,
    KnobsChanged,
    KnobValue,
    KVCounts,
    Phase,
    Preempted,
    RequestEvent,
    RequestView,
    RowFlag,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.blocks import BlockMap
from stepscope.recordings.outcome import Outcome

KEEP_FINISHED_STEPS = 256  # a finished request stays in view for so many steps

_DECODE = int(Phase.DECODE)
_RECOMPUTE = int(Phase.RECOMPUTE)
_LAST_CHUNK = int(RowFlag.LAST_CHUNK)


@dataclass(slots=True)
class SessionState:
    """State of one engine as of the last message applied.

    `requests` holds the live ones and those that finished within the last `KEEP_FINISHED_STEPS`
    steps. Only views of running requests are changed in place; all others are replaced, so copies
    share them. `blocks` is None when the engine does not tell. Readers must not change anything.
    """

    info: EngineInfo | None = None
    knobs: dict[str, KnobValue] = field(default_factory=dict)
    knobs_version: int = 0
    state: EngineState = "idle"
    step: int = -1
    time_ns: int = 0  # of the engine, when the last message was true
    requests: dict[int, RequestView] = field(default_factory=dict)
    blocks: BlockMap | None = None
    kv: KVCounts | None = None
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] | None = None
    num_dropped: int = 0
    workload: str | None = None
    _finished: deque[int] = field(default_factory=deque, compare=False, repr=False)

    # Copies

    def copy(self) -> "SessionState":
        """A copy that later messages to this one do not change."""
        other = copy.copy(self)
        other.requests = {
            request_id: copy.copy(view) if view.status == "running" else view
            for request_id, view in self.requests.items()
        }
        other._finished = self._finished.copy()
        if self.blocks is not None:
            other.blocks = self.blocks.copy()
        return other

    @property
    def block_owner(self) -> "array[int] | None":
        """Latest holder of each block (a request id, `CACHED` or `EMPTY`)."""
        return None if self.blocks is None else self.blocks.owner

    @property
    def block_refs(self) -> "array[int] | None":
        """References to each block."""
        return None if self.blocks is None else self.blocks.refs

    def snapshot(self, sequence: int) -> Snapshot | None:
        """This state as a message, true right after the message `sequence`.

        None before the engine has said who it is.
        """
        if self.info is None:
            return None
        return Snapshot(
            sequence=sequence,
            step=self.step,
            time_ns=self.time_ns,
            info=self.info,
            knobs=self.knobs,
            knobs_version=self.knobs_version,
            state=self.state,
            requests=[copy.copy(view) for view in self.requests.values()],
            blocks=None if self.blocks is None else self.blocks.runs(),
            kv=self.kv,
            num_dropped=self.num_dropped,
            workload=self.workload,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            waiting_reasons=self.waiting_reasons,
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> "SessionState":
        """The inverse of `snapshot`."""
        views = snapshot.requests
        num_running = snapshot.num_running
        if num_running is None:
            num_running = sum(view.status == "running" for view in views)
        num_waiting = snapshot.num_waiting
        if num_waiting is None:
            num_waiting = sum(view.status in ("waiting", "preempted") for view in views)
        state = cls(
            info=snapshot.info,
            knobs=snapshot.knobs,
            knobs_version=snapshot.knobs_version,
            state=snapshot.state,
            step=snapshot.step,
            time_ns=snapshot.time_ns,
            requests={view.request_id: copy.copy(view) for view in views},
            blocks=None if snapshot.blocks is None else BlockMap.from_runs(snapshot.blocks),
            kv=snapshot.kv,
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_reasons=snapshot.waiting_reasons,
            num_dropped=snapshot.num_dropped,
            workload=snapshot.workload,
        )
        finished = [view for view in views if view.status == "finished"]
        finished.sort(key=lambda view: -1 if view.finish_step is None else view.finish_step)
        state._finished.extend(view.request_id for view in finished)
        return state

    # Messages

    def apply(self, message: Telemetry) -> Outcome | None:
        """Take one message. Gives what a step brought, None for all other messages."""
        if isinstance(message, StepRecord):
            return self._apply_step(message)
        if isinstance(message, EngineStatus):
            self._apply_status(message)
        elif isinstance(message, EngineInfo):
            self._apply_info(message)
        elif isinstance(message, KnobsChanged):
            self.knobs = {**self.knobs, **message.new}
            self.knobs_version = message.version
            self.time_ns = max(self.time_ns, message.time_ns)
        elif isinstance(message, Snapshot):
            self._resync(message)
        return None

    def _apply_info(self, info: EngineInfo) -> None:
        if self.info is not None and self.info.engine_id != info.engine_id:
            self._become(SessionState())
        self.info = info

    def _apply_status(self, status: EngineStatus) -> None:
        self.time_ns = max(self.time_ns, status.time_ns)
        self.state = status.state
        outcome = Outcome()
        for event in status.events:
            self._apply_event(event, status.time_ns, outcome)
        self._apply_moves(status, is_start=status.step < 0)
        self.step = max(self.step, status.step)
        self.num_running = status.num_running
        self.num_waiting = status.num_waiting
        if not status.num_waiting:
            self.waiting_reasons = None if self.waiting_reasons is None else {}
        self.kv = status.kv
        self.num_dropped = status.num_dropped
        self.workload = status.workload

    def _apply_step(self, record: StepRecord) -> Outcome:
        outcome = Outcome()
        self.step = record.step
        self.time_ns = max(self.time_ns, record.tokens_ns)
        if self.state == "idle":
            self.state = "running"
        ends: list[RequestEvent] = []
        for event in record.events:
            # These come of the tokens that the rows below compute.
            if isinstance(event, Finished | FirstToken):
                ends.append(event)
            else:
                self._apply_event(event, record.schedule_start_ns, outcome)
        if record.batch is not None:
            self._apply_rows(record.batch, record.tokens_ns, outcome)
        for event in ends:
            self._apply_event(event, record.tokens_ns, outcome)
        self._apply_moves(record, is_start=record.step == 0)
        self.num_running = record.num_running
        self.num_waiting = record.num_waiting
        self.waiting_reasons = record.waiting_reasons
        self.kv = record.kv
        self.num_dropped = record.num_dropped
        self._forget_finished()
        return outcome

    def _apply_rows(self, batch: list[BatchRow], now_ns: int, outcome: Outcome) -> None:
        requests = self.requests
        gaps = outcome.gaps_ns
        max_gap_ns = -1
        for row in batch:
            view = requests.get(row.request_id)
            if view is None or view.status != "running":
                view = self._seat(row)
            end = row.start + row.num_tokens
            view.num_computed_tokens = end
            view.num_blocks = row.num_blocks
            if row.phase == _DECODE:
                outcome.num_decode_rows += 1
            else:
                outcome.num_cached_tokens += row.num_cached_tokens
                if row.phase == _RECOMPUTE:
                    outcome.num_recomputed_tokens += row.num_tokens
                if view.is_partial and end > view.num_prompt_tokens:
                    view.num_prompt_tokens = end
                if not row.flags & _LAST_CHUNK:
                    continue
            # Position and prompt tell the count, so that it is right again after lost steps.
            num_output_tokens = end + 1 - view.num_prompt_tokens
            outcome.num_output_tokens += 1
            last_ns = view.last_token_ns
            if last_ns is None:
                if num_output_tokens == 1:
                    view.first_token_ns = now_ns
                    if not view.is_partial:
                        outcome.ttft_ns.append((row.request_id, now_ns - view.arrival_ns))
            elif num_output_tokens == view.num_output_tokens + 1:
                gap_ns = now_ns - last_ns
                gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
                if gap_ns > max_gap_ns:
                    max_gap_ns = gap_ns
                    outcome.max_gap_request_id = row.request_id
            view.num_output_tokens = num_output_tokens
            view.last_token_ns = now_ns
        if max_gap_ns >= 0:
            outcome.max_gap_ns = max_gap_ns

    def _seat(self, row: BatchRow) -> RequestView:
        """A view to be changed in place, of a request that no event announced as running."""
        view = self.requests.get(row.request_id)
        if view is None:
            view = _partial(row.request_id)
            view.num_prompt_tokens = row.start
        else:
            if view.status == "finished":
                self._finished.remove(row.request_id)
            view = copy.copy(view)
            view.finish_reason = view.finish_step = view.finish_ns = None
        view.status = "running"
        self.requests[row.request_id] = view
        return view

    def _apply_event(self, event: RequestEvent, time_ns: int, outcome: Outcome) -> None:
        if isinstance(event, Arrived):
            outcome.num_arrived += 1
            known = self.requests.get(event.request_id)
            if known is None or known.is_partial:
                self.requests[event.request_id] = _arrived(event, known)
            return
        if not isinstance(event, Admitted | FirstToken | Finished | Preempted | Aborted):
            return  # a rejected request never was one
        known = self.requests.get(event.request_id)
        if known is not None and known.status == "finished":
            return
        if isinstance(event, FirstToken) and known is not None and known.first_token_ns is not None:
            return  # its row has told already
        view = copy.copy(known) if known is not None else _partial(event.request_id)
        self.requests[event.request_id] = view
        if isinstance(event, Admitted):
            view.status = "running"
            view.num_computed_tokens = event.num_cached_tokens
            if view.num_preemptions == 0:
                view.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, FirstToken):
            view.first_token_ns = view.last_token_ns = time_ns
            if not view.is_partial:
                outcome.ttft_ns.append((view.request_id, time_ns - view.arrival_ns))
        elif isinstance(event, Preempted):
            outcome.num_preempted += 1
            view.status = "preempted"
            view.num_preemptions += 1
            view.num_computed_tokens = 0
            view.num_blocks = 0
        else:
            view.status = "finished"
            view.finish_step = self.step
            view.finish_ns = time_ns
            view.num_blocks = 0
            self._finished.append(view.request_id)
            if isinstance(event, Aborted):
                view.finish_reason = "abort"
                return
            outcome.num_finished += 1
            view.finish_reason = event.reason
            view.num_output_tokens = event.num_output_tokens
            if (
                view.first_token_ns is not None
                and view.last_token_ns is not None
                and view.num_output_tokens > 1
            ):
                decode_ns = view.last_token_ns - view.first_token_ns
                outcome.tpot_ns.append(
                    (view.request_id, round(decode_ns / (view.num_output_tokens - 1)))
                )

    def _apply_moves(self, message: StepRecord | EngineStatus, *, is_start: bool) -> None:
        kv = message.kv
        if self.blocks is None and is_start and kv is not None:
            # Before its first step an engine holds nothing, so the moves alone tell everything.
            self.blocks = BlockMap.empty(kv.used + kv.cached + kv.empty)
        if self.blocks is not None:
            self.blocks.apply(message.moves)

    def _forget_finished(self) -> None:
        oldest = self.step - KEEP_FINISHED_STEPS
        finished = self._finished
        while finished:
            view = self.requests.get(finished[0])
            if view is not None and view.finish_step is not None and view.finish_step > oldest:
                return
            self.requests.pop(finished.popleft(), None)

    def _resync(self, snapshot: Snapshot) -> None:
        """Take over a snapshot, and keep showing what finished shortly before it."""
        fresh = SessionState.from_snapshot(snapshot)
        if self.info is not None and self.info.engine_id == snapshot.info.engine_id:
            ended = []
            for request_id, view in self.requests.items():
                if request_id in fresh.requests:
                    continue
                if view.status != "finished":
                    # It ended while nobody was listening: when and why is not known.
                    view = copy.copy(view)
                    view.status = "finished"
                    view.finish_step = snapshot.step
                    view.num_blocks = 0
                ended.append(view)
            ended.sort(key=lambda view: -1 if view.finish_step is None else view.finish_step)
            fresh.requests.update((view.request_id, view) for view in ended)
            fresh._finished.extend(view.request_id for view in ended)
        self._become(fresh)

    def _become(self, other: "SessionState") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


def request_name(request_id: int) -> str:
    """What people call a request."""
    return f"r{request_id}"


def _partial(request_id: int) -> RequestView:
    return RequestView(
        request_id=request_id,
        client_id="",
        status="waiting",
        arrival_ns=0,
        num_prompt_tokens=0,
        max_tokens=0,
        is_partial=True,
    )


def _arrived(event: Arrived, known: RequestView | None) -> RequestView:
    view = copy.copy(known) if known is not None else _partial(event.request_id)
    view.client_id = event.client_id
    view.arrival_ns = event.time_ns
    view.num_prompt_tokens = event.num_prompt_tokens
    view.max_tokens = event.max_tokens
    view.priority = event.priority
    view.is_partial = False
    return view
