"""`TelemetryOutlet`: publishes an engine's telemetry. Belongs to the engine's thread.

A snapshot is made between two steps, on the engine's thread, by a walk over all blocks and
requests. Snapshots take at most `SHARE` of the engine's time, however many clients ask. A client
that asks too soon after the last snapshot waits, at most `MAX_WAIT_NS`, and all waiting clients get
the same snapshot. It is always made after they asked, so that it includes the effect of every
command that was answered before.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.inbox import Client
from stepscope.engine.loop.pipeline import PendingStep
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.workload.arrivals import describe, fields_of
from stepscope.engine.workload.load import WorkloadDriver

SHARE = 0.01
MAX_WAIT_NS = 1_000_000_000


@dataclass(eq=False)
class SnapshotQueue:
    """The clients that wait for a snapshot, and the earliest time of the next snapshot."""

    make: Callable[[], wire.Snapshot]
    clock: Callable[[], int]
    _waiting: list[Client] = field(default_factory=list)
    _next_ns: int = 0  # the next snapshot is made no earlier

    def ask(self, client: Client) -> None:
        """Queue `client`: it gets a snapshot in one of the next calls of `serve`."""
        self._waiting.append(client)

    @property
    def due_ns(self) -> int:
        """When to call `serve`; never (`sys.maxsize`) if no client waits."""
        return self._next_ns if self._waiting else sys.maxsize

    def serve(self, *, at_once: bool = False) -> None:
        """Send a snapshot to all waiting clients, if one is due. Call it between steps."""
        if not self._waiting:
            return
        start_ns = self.clock()
        if start_ns < self._next_ns and not at_once:
            return
        snapshot = self.make()
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            client.reply(snapshot)
        end_ns = self.clock()
        self._next_ns = end_ns + min(round((end_ns - start_ns) / SHARE), MAX_WAIT_NS)


def request_view(request: Request) -> wire.RequestView:
    """Describe a request as a snapshot contains it."""
    return wire.RequestView(
        request_id=request.request_id,
        client_id=request.client_id,
        status=request.status.value,
        arrival_ns=request.arrival_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
        num_preemptions=request.num_preemptions,
        first_token_ns=request.first_token_ns,
        last_token_ns=request.last_token_ns,
        origin=request.origin,
        held="priority" if request.was_overtaken else "",
        high_water=request.high_water,
    )


class TelemetrySink(Protocol):
    """Publishes messages: `telemetry.Publisher`, or what stands before or instead of it."""

    @property
    def next_sequence(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...

    def publish(self, message: wire.Telemetry) -> None: ...


@dataclass(eq=False)
class TelemetryOutlet:
    """Publishes step records and statuses; each reports what happened since the last message."""

    sink: TelemetrySink | None
    scheduler: Scheduler
    workload: WorkloadDriver | None
    control_tally: ControlTally
    has_unpublished: bool = False  # whether something happened that no message has reported yet
    # When the engine was paused, as its messages show it.
    pauses: PauseTrail = field(default_factory=lambda: PauseTrail(()))

    @property
    def num_dropped(self) -> int:
        """Number of messages that at least one subscriber missed."""
        return 0 if self.sink is None else self.sink.num_dropped

    def publish(self, message: wire.Telemetry) -> None:
        if self.sink is not None:
            self.sink.publish(message)

    def publish_record(self, sink: TelemetrySink, draft: StepDraft, step: PendingStep) -> None:
        """Add the request events to the record of a step, and publish the record."""
        if self.has_unpublished or self.scheduler.unpublished_events or step.events:
            self.has_unpublished = False
            draft.events = step.events + self.scheduler.drain_events()
        draft.num_dropped = sink.num_dropped
        if self.pauses.is_on:
            self.pauses = self.pauses.after(draft)
        sink.publish(draft)

    def publish_status(
        self, state: wire.EngineState, last_step: int, now_ns: int, leased: wire.LeasedKnobs | None
    ) -> None:
        """Publish the engine's status. There must be no step in flight."""
        scheduler = self.scheduler
        # Read once: the workload may end meanwhile.
        workload = None if self.workload is None else self.workload.spec
        self.has_unpublished = False
        status = wire.EngineStatus(
            time_ns=now_ns,
            state=state,
            step=last_step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv=scheduler.kv.counts(),
            moves=scheduler.kv.drain_moves(),
            events=scheduler.drain_events(),
            num_dropped=self.num_dropped,
            workload=None if workload is None else describe(workload),
            control=self.control_tally.counts(),
            workload_spec=None if workload is None else fields_of(workload),
            leased=leased,
        )
        self.pauses = self.pauses.after(status)
        self.publish(status)
