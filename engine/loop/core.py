"""`EngineCore`: the loop. Everything in it runs on one thread, the engine's.

Whatever a client or an operator asks for waits in the inbox and is applied between two steps, at
the top of the next one; the record of that step says so.

Where steps overlap (`Pipeline`), new requests join at any time; whatever else changes something
waits until no step is in flight, so that it holds from the next one on, as without overlap.
"""

import queue
from collections.abc import Callable
from typing import Protocol

from stepscope.engine.loop.audit import AuditTrail
from stepscope.engine.loop.delivery import Delivery
from stepscope.engine.loop.inbox import Call, Client, Denial, Departure, Inbox, Item, Refusal
from stepscope.engine.loop.pipeline import Pipeline
from stepscope.engine.loop.snapshot_desk import SnapshotDesk
from stepscope.engine.protocol.commands import Change, Submit
from stepscope.engine.protocol.config import Limits
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.wire import (
    Arrived,
    ControlCounts,
    EngineInfo,
    EngineState,
    Rejected,
    RequestEvent,
    Snapshot,
    Telemetry,
)
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import Runner
from stepscope.engine.telemetry.heartbeat import SignsOfLife
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.telemetry.snapshots import snapshot
from stepscope.engine.telemetry.token_teller import TokenTeller
from stepscope.engine.text.stop_strings import StopText


class TelemetrySink(Protocol):
    """Where records go; `telemetry.Publisher` is the real one."""

    @property
    def next_sequence(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...

    def publish(self, message: Telemetry) -> None: ...


class EngineCore:
    """One model, one scheduler, one loop.

    Args:
        info: published as it stands.
        runner: executes steps; its clock is the engine's time.
        scheduler: owns the queues and, through its KV cache manager, the blocks.
        limits: bounds of the knobs.
        sink: where telemetry goes; None publishes nothing.
        apply: carries out one command (`dispatch.apply`).
        eos_token_ids: tokens that end a request.
        max_waiting: requests that may wait before a further one is refused.
        overlap: prepare steps while those before them run, where that can be done.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        scheduler: Scheduler,
        limits: Limits,
        sink: TelemetrySink | None,
        apply: Callable[["EngineCore", Call], None],
        eos_token_ids: frozenset[int] = frozenset(),
        max_waiting: int = 100_000,
        overlap: bool = False,
    ) -> None:
        self.info = info
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.sink = sink
        self.eos_token_ids = eos_token_ids
        self.max_waiting = max_waiting
        self.overlap = overlap
        self.inbox: Inbox = queue.SimpleQueue()
        self.next_step = 0
        self.next_request_id = 0
        self.knobs_version = 0
        self.steps_allowed: int | None = None  # None: run freely; 0: paused
        self.set_pauses(PauseTrail(()))
        self.draining = False
        self.stopping = False
        self.audit = AuditTrail(self.publish, runner.clock)
        self.own_workload: Callable[[], WorkloadSpec | None] = lambda: None
        self.set_workload: Callable[[WorkloadSpec | None], None] = lambda spec: None
        self.control_counts: Callable[[], ControlCounts | None] = lambda: None
        self.anchored: Callable[[EngineInfo], EngineInfo] = lambda info: info
        self.token_teller: TokenTeller | None = None  # None: tokens stay here
        self.snapshots = SnapshotDesk(self.snapshot, runner.clock)
        self.kept_snapshots = KeptSnapshots()
        self._apply = apply
        self.delivery = Delivery()
        self._signs = SignsOfLife(self)
        self._pipeline = Pipeline(self)
        self.has_untold = False  # something happened that no message has told yet

    # The loop

    def run(self) -> None:
        """Step until told to stop; sleep while there is nothing to do."""
        self.publish_signs_of_life(idle=True)  # who we are comes before what we do
        while not self.stopping:
            if not self.step():
                self.publish_signs_of_life(idle=True)
                if not self.stopping:
                    self._wait()
            else:
                self.publish_signs_of_life(idle=False)
        self.settle()
        for request_id in list(self.scheduler.requests):
            self.abort(request_id, "the engine was shut down")
        self.snapshots.serve(at_once=True)
        self.audit.tell()
        self._signs.publish_status("stopped")

    def step(self) -> bool:
        """One forward step, and the launch of the next one; False when there is nothing to run."""
        if self._signs.is_overdue:
            self.settle()
            self.publish_signs_of_life(idle=False)
        self._apply_commands()
        return self._pipeline.step()

    def settle(self) -> None:
        """Wait for the step in flight, if there is one, and tell of it."""
        self._pipeline.settle()

    @property
    def has_step_in_flight(self) -> bool:
        return self._pipeline.has_step_in_flight

    # The inbox

    def _apply_commands(self) -> None:
        while True:
            try:
                call = self.inbox.get_nowait()
            except queue.Empty:
                break
            self._take(call)
        due_ns = self.snapshots.due_ns
        if due_ns is not None:
            if self.has_step_in_flight and self.runner.clock() >= due_ns:
                self.settle()
            self.snapshots.serve()

    def _take(self, item: Item) -> None:
        self.has_untold = True
        if isinstance(item, Refusal):
            self.refuse(item.client_id, item.reason)
        elif isinstance(item, Denial):
            self.audit.refused(item.command, item.asker, item.code, item.message, item.count)
        elif isinstance(item, Departure):
            self.settle()
            self.abort(item.request_id, "its client is gone")
        else:
            if isinstance(item.command, Change):
                self.settle()
            self._apply(self, item)

    def _wait(self) -> None:
        """Until something is asked, or a sign of life is due."""
        due_ns = self.snapshots.due_ns
        until_ns = self._signs.next_status_ns
        until_ns = until_ns if due_ns is None else min(due_ns, until_ns)
        left_ns = until_ns - self.runner.clock()
        try:
            call = self.inbox.get(timeout=max(left_ns, 1_000_000) / 1e9)
        except queue.Empty:
            return
        self._take(call)

    # What commands do (called by dispatch, between steps)

    def add(
        self,
        submit: Submit,
        token_ids: list[int],
        client: Client,
        stop_text: StopText | None = None,
        prompt_text: str | None = None,
        arrival_ns: int | None = None,
    ) -> Request:
        """Queue a prepared prompt.

        Args:
            stop_text: looks for the stop strings of `submit`.
            prompt_text: for telemetry, where it is to be told.
            arrival_ns: see `Call`.
        """
        request = Request(
            request_id=self._new_request_id(),
            prompt_token_ids=token_ids,
            sampling=submit.sampling,
            arrival_ns=self.runner.clock() if arrival_ns is None else arrival_ns,
            client_id=submit.client_id,
            priority=submit.priority,
            eos_token_ids=self.eos_token_ids,
            stop_text=stop_text,
        )
        self.delivery.expect(request, client, submit)
        if self.token_teller is not None:
            self.token_teller.arrived(request, prompt_text)
        self.scheduler.untold_events.append(
            Arrived(
                request_id=request.request_id,
                client_id=request.client_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=submit.sampling.max_tokens,
                priority=request.priority,
                time_ns=request.arrival_ns,
                prompt_token_ids=None if self.token_teller is None else token_ids,
                prompt_text=prompt_text,
            )
        )
        self.scheduler.add(request)
        return request

    def refuse(self, client_id: str, reason: str) -> None:
        """Note in the next record that a request was turned away."""
        self.scheduler.untold_events.append(
            Rejected(request_id=self._new_request_id(), client_id=client_id, reason=reason)
        )

    def _new_request_id(self) -> int:
        self.next_request_id += 1
        return self.next_request_id - 1

    def abort(self, request_id: int, reason: str) -> bool:
        """End a request now; its client gets a last Output. False if there is no such request."""
        request = self.scheduler.abort(request_id, reason)
        if request is None:
            return False
        self.delivery.abort(request)
        if self.token_teller is not None:
            self.token_teller.ended(request_id)
        return True

    def publish(self, message: Telemetry) -> None:
        if self.sink is not None:
            self.sink.publish(message)

    def set_pauses(self, trail: PauseTrail) -> None:
        self.pauses = trail
        self.tells_of_pause = trail.is_on  # kept, for every step asks

    @property
    def state(self) -> EngineState:
        has_work = self.scheduler.has_work()
        # Steps that are still allowed make no idle engine: whoever comes next is held after them.
        if self.steps_allowed == 0 or (self.steps_allowed is not None and not has_work):
            return "paused"
        if self.draining:
            return "draining"
        return "running" if has_work else "idle"

    def snapshot(self) -> Snapshot:
        """The state as of the last message published.

        What happened since it is flushed first, so that nothing can be in the snapshot that a
        later message repeats.
        """
        self.settle()
        self.audit.tell()
        self._signs.publish_status(self.state)
        return snapshot(
            sequence=self.sink.next_sequence - 1 if self.sink is not None else 0,
            step=self.next_step - 1,
            time_ns=self.runner.clock(),
            info=self.info,
            knobs=self.scheduler.knobs,
            knobs_version=self.knobs_version,
            state=self.state,
            scheduler=self.scheduler,
            num_dropped=self.sink.num_dropped if self.sink is not None else 0,
            workload=self.own_workload(),
            control=self.control_counts(),
            audit=self.audit.last(),
            transcripts=None if self.token_teller is None else self.token_teller.transcripts(),
            pauses=list(self.pauses.spans or ()),
        )

    def publish_signs_of_life(self, *, idle: bool) -> None:
        """Say who we are and how we stand, if it is time; what happened, too, if `idle`."""
        self.audit.tell_if_due()
        self._signs.publish(idle=idle)

    def drain_events(self) -> list[RequestEvent]:
        """What happened to requests and was not told yet, in order."""
        self.has_untold = False
        return self.scheduler.drain_events()

    def return_events(self, events: list[RequestEvent]) -> None:
        """Nobody was told of these, which were drained: they come first."""
        self.scheduler.untold_events[:0] = events
        self.has_untold = True
