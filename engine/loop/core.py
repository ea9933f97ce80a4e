"""`EngineCore`: the engine's loop. Everything in it runs on one thread, the engine's.

A step is scheduled, executed, updated and published. Commands wait in the inbox; the engine applies
them before the next step, and the record of that step shows their effect.

With overlap (`Pipeline` schedules a step while the one before it runs), new requests join at any
time. Before any other change the engine finishes the step in flight, so that the change holds from
the next step on, as without overlap.
"""

import queue
from collections.abc import Callable, Mapping

import msgspec

from stepscope.engine.loop import changes, dispatch
from stepscope.engine.loop.audit import AuditTrail, ControlTally
from stepscope.engine.loop.changes import KnobLease
from stepscope.engine.loop.client_requests import ClientRequests, OtherEngine
from stepscope.engine.loop.inbox import CommandTime, Denial, Departure, Inbox, Item, Refusal, Task
from stepscope.engine.loop.outlet import SnapshotQueue, TelemetryOutlet, TelemetrySink, request_view
from stepscope.engine.loop.pipeline import PendingStep, Pipeline
from stepscope.engine.protocol.commands import Change
from stepscope.engine.protocol.wire import EngineInfo, EngineState, KnobValue, Snapshot, Telemetry
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import Runner
from stepscope.engine.telemetry.heartbeat import Heartbeat
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.telemetry.step_watcher import StepUnderWay
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.engine.workload.arrivals import describe, fields_of
from stepscope.engine.workload.load import WorkloadDriver


class EngineCore:
    """One model, one scheduler, one loop.

    Args:
        runner: executes steps; its clock is the engine's time.
        sink: where telemetry goes; None publishes nothing.
        workload: runs the engine's own workload; None: the engine refuses `SetWorkload`.
        anchor: brings the clocks in `info` up to date before it is published.
        other_engine: makes the link to a decode engine that continues requests; None: no such
            engine.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        scheduler: Scheduler,
        sink: TelemetrySink | None,
        eos_token_ids: frozenset[int] = frozenset(),
        max_waiting: int = 100_000,
        overlap: bool = False,
        *,
        inbox: Inbox | None = None,
        workload: WorkloadDriver | None = None,
        token_publisher: TokenPublisher | None = None,
        control_tally: ControlTally | None = None,
        anchor: Callable[[EngineInfo], EngineInfo] | None = None,
        other_engine: "Callable[[EngineCore], OtherEngine] | None" = None,
    ) -> None:
        self.info = info
        self.runner = runner
        self.scheduler = scheduler
        self.max_waiting = max_waiting
        self.overlap = overlap
        self.clock = runner.clock
        self.inbox: Inbox = Inbox() if inbox is None else inbox
        self.workload = workload
        self.control_tally = ControlTally() if control_tally is None else control_tally
        self._command_time = CommandTime(runner.clock)
        self.knobs_version = 0
        self.draining = False
        self.stopping = False
        self.outlet = TelemetryOutlet(sink, scheduler, workload, self.control_tally)
        self.audit = AuditTrail(self.outlet.publish, runner.clock)
        self.lease = KnobLease()
        self.snapshots = SnapshotQueue(self.snapshot, runner.clock)
        self.kept_snapshots = KeptSnapshots()
        self._anchor = anchor
        self.client_requests = ClientRequests(
            scheduler, runner.clock, eos_token_ids, token_publisher
        )
        self.pipeline = Pipeline(runner, scheduler, self.client_requests, overlap=overlap)
        self._heartbeat = Heartbeat(self)
        self._other_engine = None if other_engine is None else other_engine(self)

    # The loop

    def run(self) -> None:
        """Run steps until `stop` is called; sleep while there is nothing to do.

        Raises DeviceLostError: the device failed, and all requests have ended.
        """
        try:
            self.publish_heartbeat(idle=True)  # publishes `EngineInfo` before the first record
            while not self.stopping:
                if not self.step():
                    self.publish_heartbeat(idle=True)
                    if not self.stopping:
                        self._wait()
                else:
                    self.publish_heartbeat(idle=False)
            self.settle()
            reason = str(self.pipeline.lost or "the engine was shut down")
            for request_id in list(self.scheduler.requests):
                self.client_requests.give_back(request_id)
                self.abort(request_id, reason)
            if self._other_engine is not None:
                self._other_engine.close()
            self.snapshots.serve(at_once=True)
            self.audit.publish_all()
            self._heartbeat.publish_status("stopped")
        finally:
            self.stopping = False
        if self.pipeline.lost is not None:
            raise self.pipeline.lost

    def step(self) -> bool:
        """Run one forward step. Returns False if there was nothing to run.

        With overlap, `schedule` also launches the step after this one, which runs while the engine
        updates and publishes this one.
        """
        self._before_step()
        if not self.pipeline.has_step:
            return False
        self._finish(
            self.pipeline.schedule(self.knobs_version, with_record=self.outlet.sink is not None)
        )
        return True

    def settle(self) -> None:
        """Finish the step in flight, if there is one; schedule no other step."""
        self._finish(self.pipeline.take_in_flight())

    def _finish(self, step: PendingStep | None) -> None:
        """Execute a scheduled step, update the requests, and publish its record."""
        if step is None:
            return
        result = self.pipeline.execute(step)
        if result is None:  # it failed
            self.outlet.has_unpublished = True
            self.stopping |= self.pipeline.lost is not None
            return
        num_finished = self.pipeline.update(step, result)
        if self._other_engine is not None:
            self._other_engine.after_step(step.rows)
        sink, draft = self.outlet.sink, step.draft
        if sink is not None and draft is not None:
            self.pipeline.complete(draft, step, result, num_finished)
            self.outlet.publish_record(sink, draft, step)

    @property
    def has_unpublished(self) -> bool:
        return self.outlet.has_unpublished

    @property
    def has_step_in_flight(self) -> bool:
        return self.pipeline.ahead is not None

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The step that the engine's thread launches or waits for. From any thread."""
        return self.pipeline.step_under_way

    @property
    def next_step(self) -> int:
        """Number of the next step to be scheduled."""
        return self.pipeline.next_step

    @property
    def last_step(self) -> int:
        """Number of the newest published step, if none is in flight; -1 before the first."""
        return self.pipeline.next_step - 1

    # The inbox

    def _before_step(self) -> None:
        if self._heartbeat.is_overdue:
            self.settle()
            self.publish_heartbeat(idle=False)
        self._command_time.take(self.inbox, self._take)
        if self.lease.is_due:
            self.settle()
            changes.end_lease_if_due(self)
        if self.has_step_in_flight and self.runner.clock() >= self.snapshots.due_ns:
            self.settle()
        self.snapshots.serve()

    def _take(self, item: Item) -> None:
        if isinstance(item, Denial):
            self.audit.refused(item.command, item.asker, item.code, item.message)
            return
        self.outlet.has_unpublished = True
        if isinstance(item, Task):
            item.do()
        elif isinstance(item, Refusal):
            self.client_requests.refuse(item.client_id, item.reason)
        elif isinstance(item, Departure):
            self._settle_for_client()
            self.abort(item.request_id, "its client is gone")
        else:
            if isinstance(item.command, Change):
                self._settle_for_client()
            dispatch.apply(self, item)

    def _settle_for_client(self) -> None:
        if self.has_step_in_flight:
            start_ns = self.runner.clock()
            self.settle()
            self._command_time.excuse(self.runner.clock() - start_ns)

    def _wait(self) -> None:
        due_ns = min(self.snapshots.due_ns, self._heartbeat.next_status_ns)
        try:
            call = self.inbox.get(timeout=max(due_ns - self.runner.clock(), 1_000_000) / 1e9)
        except queue.Empty:
            return
        self._take(call)

    # What commands do (called by dispatch, between steps)

    def abort(self, request_id: int, reason: str) -> bool:
        """End a request and send its client a last Output. False if there is no such request."""
        if self._other_engine is not None and self._other_engine.abort(request_id):
            return True
        return self.client_requests.abort(request_id, reason)

    def status_of(self, request_id: int) -> str | None:
        """Status of an unfinished request; None if there is no such request. From any thread."""
        if self._other_engine is not None and self._other_engine.is_away(request_id):
            return "handed over"
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status.value

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests, with those at the decode engine. From any thread."""
        num_away = 0 if self._other_engine is None else self._other_engine.num_away
        return len(self.scheduler.requests) + num_away

    def knobs(self, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        """Return what the knobs would be with `changes`. Raises ConfigError: one is refused."""
        knobs, limits = self.scheduler.knobs, self.scheduler.limits
        return (knobs.changed(changes, limits) if changes else knobs).as_dict()

    def set_knobs(self, changes: Mapping[str, KnobValue]) -> None:
        """Change knobs, from the next step on."""
        scheduler = self.scheduler
        scheduler.knobs = scheduler.knobs.changed(changes, scheduler.limits)
        self.knobs_version += 1

    def stop(self) -> None:
        """Make `run` return after the current step; it then aborts all unfinished requests."""
        self.stopping = True

    # Telemetry

    def publish(self, message: Telemetry) -> None:
        self.outlet.publish(message)

    def publish_heartbeat(self, *, idle: bool) -> None:
        """Publish `EngineInfo` and a status, if they are due."""
        self.audit.publish_if_due()
        self._heartbeat.publish(idle=idle)

    def publish_info(self) -> None:
        """Publish `EngineInfo`, with its clocks up to date."""
        if self._anchor is not None:
            self.info = self._anchor(self.info)
        self.publish(self.info)

    def set_decode_engine(self, name: str | None) -> None:
        """Publish to which engine requests are handed over from now on; None: to no engine."""
        self.info = msgspec.structs.replace(self.info, decode_engine=name)
        self.publish_info()

    def publish_status(self, state: EngineState, now_ns: int) -> None:
        """Publish a status, with what happened since the last message."""
        self.outlet.publish_status(state, self.last_step, now_ns, self.lease.published())

    def keep_snapshot(self, now_ns: int) -> None:
        """Take a snapshot and keep it for subscribers that join later, if one is due."""
        if self.outlet.sink is not None:
            self.kept_snapshots.keep(self.last_step, now_ns, self.snapshot, self.clock)

    @property
    def state(self) -> EngineState:
        has_work = self.scheduler.has_work()
        # It is paused, too, if single steps are allowed but there is no work for them.
        allowed = self.pipeline.steps_allowed
        if allowed == 0 or (allowed is not None and not has_work):
            return "paused"
        if self.draining:
            return "draining"
        return "running" if self.scheduler.requests else "idle"

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the state that the messages published so far lead to.

        Publishes first what happened since the last message, so that no later message repeats
        anything that is in the snapshot.
        """
        self.settle()
        self.audit.publish_aborts()
        self._heartbeat.publish_status(self.state)
        scheduler, tokens = self.scheduler, self.client_requests.token_publisher
        workload = None if self.workload is None else self.workload.spec
        return Snapshot(
            sequence=0 if self.outlet.sink is None else self.outlet.sink.next_sequence - 1,
            step=self.last_step,
            time_ns=self.runner.clock(),
            info=self.info,
            knobs=scheduler.knobs.as_dict(),
            knobs_version=self.knobs_version,
            state=self.state,
            requests=[request_view(request) for request in scheduler.requests.values()],
            blocks=scheduler.kv.runs(),
            kv=scheduler.kv.counts(),
            num_dropped=self.outlet.num_dropped,
            workload=None if workload is None else describe(workload),
            workload_spec=None if workload is None else fields_of(workload),
            control=self.control_tally.counts(),
            leased=self.lease.published(),
            audit=self.audit.last() or None,
            transcripts=None if tokens is None else tokens.transcripts(),
            pauses=self.outlet.pauses.published(),
        )
