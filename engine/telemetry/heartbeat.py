"""`SignsOfLife`: what is told without a step: who the engine is, how it stands, what happened."""

from typing import TYPE_CHECKING

from stepscope.engine.protocol.wire import EngineState, EngineStatus
from stepscope.engine.workload.arrivals import describe, fields_of

if TYPE_CHECKING:
    from stepscope.engine.loop.core import EngineCore

STATUS_INTERVAL_NS = 1_000_000_000
INFO_INTERVAL_NS = 5_000_000_000


class SignsOfLife:
    """Belongs to the engine's thread, and says when the next one is due.

    Attributes:
        next_status_ns: a status is due then, whatever happens.
        is_overdue: one was due while a step was in flight.
    """

    def __init__(self, core: "EngineCore") -> None:
        self.next_status_ns = 0
        self.is_overdue = False
        self._core = core
        self._next_info_ns = 0
        self._told_state: EngineState | None = None

    def publish(self, *, idle: bool) -> None:
        """What is due; if `idle`, also whatever happened, for no step will tell it.

        A status tells of queues and blocks as they are after the last step that was told of, so it
        waits until no step is in flight.
        """
        core = self._core
        now_ns = core.runner.clock()
        if now_ns >= self._next_info_ns:
            self._next_info_ns = now_ns + INFO_INTERVAL_NS
            core.info = core.anchored(core.info)
            core.publish(core.info)
        state = core.state
        # Outside of a step nothing else would tell what happened.
        is_due = (
            state != self._told_state or now_ns >= self.next_status_ns or (idle and core.has_untold)
        )
        self.is_overdue = is_due and core.has_step_in_flight
        if is_due and not self.is_overdue:
            self.publish_status(state)
            if core.sink is not None and core.kept_snapshots.is_due(core.next_step - 1, now_ns):
                core.kept_snapshots.add(core.snapshot())
                core.kept_snapshots.rest(core.runner.clock() - now_ns)

    def publish_status(self, state: EngineState) -> None:
        """How the engine stands. There must be no step in flight."""
        core = self._core
        kv, now_ns = core.scheduler.kv, core.runner.clock()
        workload = core.own_workload()  # once: it may end meanwhile
        self._told_state = state
        core.set_pauses(core.pauses.after_status(now_ns, is_paused=state == "paused"))
        self.next_status_ns = now_ns + STATUS_INTERVAL_NS
        core.publish(
            EngineStatus(
                time_ns=now_ns,
                state=state,
                step=core.next_step - 1,
                num_running=len(core.scheduler.running),
                num_waiting=len(core.scheduler.waiting),
                kv=kv.counts(),
                moves=kv.drain_moves(),
                events=core.drain_events(),
                num_dropped=core.sink.num_dropped if core.sink is not None else 0,
                workload=None if workload is None else describe(workload),
                control=core.control_counts(),
                workload_spec=None if workload is None else fields_of(workload),
            )
        )
