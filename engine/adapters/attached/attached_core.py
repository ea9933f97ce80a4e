"""`AttachedCore`: answers commands and publishes state for an engine that is not ours.

The control server and the heartbeat use it like the core of our own engine (`EngineCore`).
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from stepscope.engine.adapters.attached.description import AttachedKnobs
from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.control.intake import Intake
from stepscope.engine.loop.audit import AuditTrail, ChangeEffect, ControlTally
from stepscope.engine.loop.changes import KnobLease, apply_knobs, end_lease_if_due
from stepscope.engine.loop.dispatch import answering_errors
from stepscope.engine.loop.inbox import Call, Denial, Departure, Inbox, Item, Refusal
from stepscope.engine.loop.outlet import SnapshotQueue
from stepscope.engine.protocol import commands, wire
from stepscope.engine.protocol.commands import Asker, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.replies import Error
from stepscope.engine.protocol.wire import EngineInfo, EngineState, KnobValue, Totals
from stepscope.engine.telemetry.heartbeat import Heartbeat, anchored
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.telemetry.publisher import Publisher

UNSUPPORTED = "unsupported"


class EngineWatcher(Protocol):
    """What each engine's package provides: queue lengths, and a recorder of requests and steps."""

    recorder: StepRecorder

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_used(self) -> float | None: ...  # the share of the KV pool; None: the pool says
    @property
    def kv_transfers(self) -> wire.KVTransfers | None: ...
    @property
    def halted(self) -> EngineState | None: ...  # paused or draining by the engine's own server


class AttachedCore:
    """Answers commands and publishes state for an attached engine.

    Use it only inside `with attachment.notes.done()`. But any thread may put into `inbox`.
    """

    def __init__(
        self,
        engine: str,
        info: EngineInfo,
        watcher: EngineWatcher,
        knobs: AttachedKnobs,
        sink: Publisher,
        tally: ControlTally,
    ) -> None:
        self._engine, self._watcher, self._recorder = engine, watcher, watcher.recorder
        self._knobs = knobs
        self.info, self.sink = info, sink
        self.inbox = Inbox()
        self._deferred: deque[Call] = deque()  # they wait for `apply_deferred`
        self.max_waiting = 1_000  # refused prompts, for the audit trail: see `NoIntake`
        self.control_tally = tally
        self.has_step_in_flight = False  # the recorder orders the steps, so nothing must wait
        self.pauses = PauseTrail(())
        self.audit = AuditTrail(self.publish, time.monotonic_ns)
        self.lease = KnobLease()
        self.snapshots = SnapshotQueue(self.snapshot, time.monotonic_ns)
        self.kept_snapshots = KeptSnapshots()
        self.heartbeat = Heartbeat(self)

    def take(self, item: Item) -> None:
        """Handle one item from the inbox: answer a command, or log a refusal in the audit trail."""
        if isinstance(item, Refusal):
            self.audit.refused(Submit.__name__, Asker(item.client_id), UNSUPPORTED, item.reason)
        elif isinstance(item, Denial):
            self.audit.refused(item.command, item.asker, item.code, item.message)
        elif isinstance(item, Call):
            if self._knobs.is_deferred and isinstance(item.command, commands.SetKnobs):
                self._deferred.append(item)
            else:
                self._apply(item)
        else:
            assert isinstance(item, Departure), "only the engine takes requests"

    def apply_deferred(self) -> None:
        """Apply deferred knob changes, and end a lease that is due, on the engine's thread."""
        while self._deferred:
            self._apply(self._deferred.popleft())
        end_lease_if_due(self)

    def _apply(self, call: Call) -> None:
        command = call.command
        with answering_errors(call):
            if isinstance(command, commands.SetKnobs):
                apply_knobs(self, call, command)
            elif isinstance(command, commands.GetSnapshot):
                self.snapshots.ask(call.client)
            elif isinstance(command, commands.GetAudit):
                call.client.reply(self.audit.page(command.after, command.limit))
            else:
                name = type(command).__name__
                message = (
                    f"{name} does not work with an attached {self._engine}: "
                    "stepscope only watches its requests"
                )
                if isinstance(command, commands.Change):
                    asker = call.asker or Asker(command.who)
                    self.audit.refused(name, asker, UNSUPPORTED, message)
                call.client.reply(Error(code=UNSUPPORTED, message=message))

    def note_change(self, command: commands.Change, detail: str) -> None:
        """Audit a change that came through the engine's own server, and publish the new state."""
        self.audit.done(command, Asker(command.who), self.next_step, ChangeEffect(detail=detail))
        self.heartbeat.publish(idle=not self.has_work)

    def snapshot(self) -> wire.Snapshot:
        """Publish everything that happened so far, then return the engine's state."""
        self.audit.publish_aborts()
        self.heartbeat.publish_status(self.state)
        pool, groups = self._recorder.pool, self._recorder.groups
        return wire.Snapshot(
            sequence=self.sink.next_sequence - 1,
            step=self.last_step,
            time_ns=time.monotonic_ns(),
            info=self.info,
            knobs=self.knobs({}),
            knobs_version=self.knobs_version,
            state=self.state,
            requests=self._recorder.views(),
            blocks=None if pool is None else pool.runs(),
            kv=None if pool is None else pool.counts(),
            kv_groups=None if groups is None else groups.counts(),
            block_groups=None if groups is None else bytes(groups.of_block),
            kv_transfers=self._watcher.kv_transfers,
            totals=None if pool is not None else Totals(kv_used=self._watcher.kv_used),
            num_dropped=self.sink.num_dropped,
            num_running=self._watcher.num_running,
            num_waiting=self._watcher.num_waiting,
            control=self.control_tally.counts(),
            audit=self.audit.last(),
            leased=self.lease.published(),
            pauses=self.pauses.published(),
        )

    def clock(self) -> int:
        return time.monotonic_ns()

    def publish(self, message: wire.Telemetry) -> None:
        self.sink.publish(message)

    def publish_info(self) -> None:
        """Publish the engine's description, with new clock readings if the clocks have drifted."""
        self.info = anchored(self.info)
        self.publish(self.info)

    def publish_status(self, state: EngineState, now_ns: int) -> None:
        """Publish the engine's state, and the request events that are not published yet."""
        kv_used = self._watcher.kv_used
        status = wire.EngineStatus(
            time_ns=now_ns,
            state=state,
            step=self.last_step,
            num_running=self._watcher.num_running,
            num_waiting=self._watcher.num_waiting,
            totals=None if kv_used is None else Totals(kv_used=kv_used),
            kv_transfers=self._watcher.kv_transfers,
            num_dropped=self.sink.num_dropped,
            control=self.control_tally.counts(),
            leased=self.lease.published(),
            **self._recorder.drain(),
        )
        self.pauses = self.pauses.after(status)
        self.publish(status)

    def keep_snapshot(self, now_ns: int) -> None:
        self.kept_snapshots.keep(self.last_step, now_ns, self.snapshot, self.clock)

    def knobs(self, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        return self._knobs.changed(changes)

    def set_knobs(self, changes: Mapping[str, KnobValue]) -> None:
        self._knobs.set(changes)
        self._recorder.knobs_version += 1

    @property
    def next_step(self) -> int:
        return self._recorder.next_step

    @property
    def last_step(self) -> int:
        return self._recorder.published_step

    @property
    def has_unpublished(self) -> bool:
        return self._recorder.has_unpublished

    @property
    def knobs_version(self) -> int:
        return self._recorder.knobs_version

    @property
    def state(self) -> EngineState:
        return self._watcher.halted or ("running" if self.has_work else "idle")

    @property
    def has_work(self) -> bool:
        watcher = self._watcher
        return bool(watcher.num_running or watcher.num_waiting or self._recorder.has_step_in_flight)


class NoIntake(Intake):
    """Refuses every prompt: requests must go to the engine's own server."""

    def __init__(self, engine: str) -> None:
        super().__init__(None, vocab_size=1, max_model_len=1)
        self._engine = engine

    def prepare(self, command: Submit) -> list[int]:
        raise ConfigError(
            UNSUPPORTED,
            f"send requests to {self._engine}'s own server: stepscope only watches them",
        )
