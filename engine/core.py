"""`EngineCore`: the loop. Everything in it runs on one thread, the engine's.

Whatever a client or an operator asks for waits in the inbox and is applied between two steps, at
the top of the next one; the record of that step says so.
"""

import itertools
import logging
import queue
from collections.abc import Callable
from typing import Protocol

from stepscope.engine import records
from stepscope.engine.audit import AuditTrail
from stepscope.engine.commands import Submit, WorkloadSpec
from stepscope.engine.config import Limits
from stepscope.engine.delivery import Delivery
from stepscope.engine.inbox import Call, Client, Denial, Departure, Inbox, Item, Refusal
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.snapshot_desk import SnapshotDesk
from stepscope.engine.step import Runner, ScheduledRow, ScheduledStep, StepResult
from stepscope.engine.stop_strings import StopText
from stepscope.engine.token_teller import TokenTeller
from stepscope.engine.wire import (
    Arrived,
    ControlCounts,
    EngineInfo,
    EngineState,
    EngineStatus,
    Rejected,
    RequestEvent,
    Snapshot,
    Telemetry,
)

log = logging.getLogger("stepscope.engine")

STATUS_INTERVAL_NS = 1_000_000_000
INFO_INTERVAL_NS = 5_000_000_000


class TelemetrySink(Protocol):
    """Where records go; `telemetry.Publisher` is the real one."""

    next_sequence: int
    num_dropped: int

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
    ) -> None:
        self.info = info
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.sink = sink
        self.eos_token_ids = eos_token_ids
        self.max_waiting = max_waiting
        self.inbox: Inbox = queue.SimpleQueue()
        self.next_step = 0
        self.knobs_version = 0
        self.steps_allowed: int | None = None  # None: run freely; 0: paused
        self.draining = False
        self.stopping = False
        self.audit = AuditTrail(self.publish, runner.clock)
        self.describe_workload: Callable[[], str | None] = lambda: None
        self.set_workload: Callable[[WorkloadSpec | None], None] = lambda spec: None
        self.control_counts: Callable[[], ControlCounts | None] = lambda: None
        self.anchored: Callable[[EngineInfo], EngineInfo] = lambda info: info
        self.token_teller: TokenTeller | None = None  # None: tokens stay here
        self.snapshots = SnapshotDesk(self.snapshot, runner.clock)
        self._apply = apply
        self._request_ids = itertools.count()
        self._delivery = Delivery()
        self._events: list[RequestEvent] = []
        self._told_state: EngineState | None = None
        self._untold = False  # something happened that no message has told yet
        self._next_status_ns = 0
        self._next_info_ns = 0

    # The loop

    def run(self) -> None:
        """Step until told to stop; sleep while there is nothing to do."""
        self.publish_signs_of_life(idle=True)  # who we are comes before what we do
        while not self.stopping:
            if not self.step():
                self.publish_signs_of_life(idle=True)
                self._wait()
            else:
                self.publish_signs_of_life(idle=False)
        for request_id in list(self.scheduler.requests):
            self.abort(request_id, "the engine was shut down")
        self.snapshots.serve(at_once=True)
        self._publish_status("stopped")

    def step(self) -> bool:
        """One forward step; False when there is nothing to run."""
        self._apply_commands()
        if self.steps_allowed == 0 or not self.scheduler.has_work():
            return False
        schedule_start_ns = self.runner.clock()
        rows = self.scheduler.schedule()
        schedule_end_ns = self.runner.clock()
        if not rows:
            return True  # the only request preempted itself: it is admitted again by the next step
        result = self._execute(rows)
        if result is None:
            return True
        batch = records.batch_rows(rows, self.scheduler) if self.sink is not None else []
        self.scheduler.update(rows, result.token_ids)
        teller = self.token_teller
        texts = None if teller is None else teller.texts(rows, result.token_ids)
        self._delivery.deliver(rows, result)
        if self.sink is not None:
            self.sink.publish(
                records.step_record(
                    step=self.next_step,
                    schedule_ns=(schedule_start_ns, schedule_end_ns),
                    result=result,
                    batch=batch,
                    scheduler=self.scheduler,
                    knobs_version=self.knobs_version,
                    events=self._drain_events(),
                    num_dropped=self.sink.num_dropped,
                    token_ids=None if teller is None else result.token_ids,
                    texts=texts,
                )
            )
        self.next_step += 1
        if self.steps_allowed is not None:
            self.steps_allowed -= 1
        return True

    def _apply_commands(self) -> None:
        while True:
            try:
                call = self.inbox.get_nowait()
            except queue.Empty:
                break
            self._take(call)
        self.snapshots.serve()

    def _take(self, item: Item) -> None:
        self._untold = True
        if isinstance(item, Refusal):
            self.refuse(item.client_id, item.reason)
        elif isinstance(item, Denial):
            self.audit.refused(item.command, item.asker, item.code, item.message, item.count)
        elif isinstance(item, Departure):
            self.abort(item.request_id, "its client is gone")
        else:
            self._apply(self, item)

    def _wait(self) -> None:
        """Until something is asked, or a sign of life is due."""
        due_ns = self.snapshots.due_ns
        until_ns = self._next_status_ns if due_ns is None else min(due_ns, self._next_status_ns)
        left_ns = until_ns - self.runner.clock()
        try:
            call = self.inbox.get(timeout=max(left_ns, 1_000_000) / 1e9)
        except queue.Empty:
            return
        self._take(call)

    def _execute(self, rows: list[ScheduledRow]) -> StepResult | None:
        try:
            return self.runner.execute(
                ScheduledStep(self.next_step, rows, self.scheduler.num_padded_tokens)
            )
        except Exception:
            # A step that fails ends the requests in it, not the engine.
            log.exception("step %d failed; its %d requests are ended", self.next_step, len(rows))
            self._untold = True
            # Blocks are known by what this step should have written to them.
            self.scheduler.kv.reset_prefix_cache()
            for row in rows:
                self.abort(row.request.request_id, "the engine failed in this step")
            return None

    # What commands do (called by dispatch, between steps)

    def add(
        self,
        submit: Submit,
        token_ids: list[int],
        client: Client,
        stop_text: StopText | None = None,
        prompt_text: str | None = None,
    ) -> Request:
        """Queue a prepared prompt.

        Args:
            stop_text: looks for the stop strings of `submit`.
            prompt_text: for telemetry, where it is to be told.
        """
        request = Request(
            request_id=next(self._request_ids),
            prompt_token_ids=token_ids,
            sampling=submit.sampling,
            arrival_ns=self.runner.clock(),
            client_id=submit.client_id,
            priority=submit.priority,
            eos_token_ids=self.eos_token_ids,
            stop_text=stop_text,
        )
        self._delivery.expect(request, client, submit)
        if self.token_teller is not None:
            self.token_teller.arrived(request, prompt_text)
        self._events.append(
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
        self._events.append(
            Rejected(request_id=next(self._request_ids), client_id=client_id, reason=reason)
        )

    def abort(self, request_id: int, reason: str) -> bool:
        """End a request now; its client gets a last Output. False if there is no such request."""
        request = self.scheduler.abort(request_id, reason)
        if request is None:
            return False
        self._delivery.abort(request)
        if self.token_teller is not None:
            self.token_teller.ended(request_id)
        return True

    def publish(self, message: Telemetry) -> None:
        if self.sink is not None:
            self.sink.publish(message)

    @property
    def state(self) -> EngineState:
        if self.steps_allowed == 0:
            return "paused"
        if self.draining:
            return "draining"
        return "running" if self.scheduler.has_work() else "idle"

    def snapshot(self) -> Snapshot:
        """The state as of the last message published.

        What happened since it is flushed first, so that nothing can be in the snapshot that a
        later message repeats.
        """
        self._publish_status(self.state)
        return records.snapshot(
            sequence=self.sink.next_sequence - 1 if self.sink is not None else 0,
            step=self.next_step - 1,
            time_ns=self.runner.clock(),
            info=self.info,
            knobs=self.scheduler.knobs,
            knobs_version=self.knobs_version,
            state=self.state,
            scheduler=self.scheduler,
            num_dropped=self.sink.num_dropped if self.sink is not None else 0,
            workload=self.describe_workload(),
            control=self.control_counts(),
            audit=self.audit.last(),
            transcripts=None if self.token_teller is None else self.token_teller.transcripts(),
        )

    # Signs of life

    def publish_signs_of_life(self, *, idle: bool) -> None:
        now_ns = self.runner.clock()
        if now_ns >= self._next_info_ns:
            self._next_info_ns = now_ns + INFO_INTERVAL_NS
            self.info = self.anchored(self.info)
            self.publish(self.info)
        # Outside of a step nothing else would tell what happened.
        if (
            self.state != self._told_state
            or now_ns >= self._next_status_ns
            or (idle and self._untold)
        ):
            self._publish_status(self.state)

    def _publish_status(self, state: EngineState) -> None:
        now_ns = self.runner.clock()
        self._told_state = state
        self._next_status_ns = now_ns + STATUS_INTERVAL_NS
        kv = self.scheduler.kv
        self.publish(
            EngineStatus(
                time_ns=now_ns,
                state=state,
                step=self.next_step - 1,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                kv=kv.counts(),
                moves=kv.drain_moves(),
                events=self._drain_events(),
                num_dropped=self.sink.num_dropped if self.sink is not None else 0,
                workload=self.describe_workload(),
                control=self.control_counts(),
            )
        )

    def _drain_events(self) -> list[RequestEvent]:
        events = self._events + self.scheduler.drain_events()
        self._events = []
        self._untold = False
        return events
