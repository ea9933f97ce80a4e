"""`SessionState`: what an observer knows of an engine after a message. A pure reducer.

It owns its requests and block arrays. It reads only messages: no clock, no socket, no file. The
caller puts messages in order and notices gaps; the reducer accepts valid messages in any order
without raising. A request whose messages were missed in part is marked as partial. Missing facts
are never invented.
"""

import copy
from array import array
from dataclasses import dataclass, field

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.audit_fold import latest
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.state.blocks import BlockMap
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.requests import RequestTable, comes_back

SIMULATED = "simulated"


def model_text(info: wire.EngineInfo) -> str:
    """The model name, marked as simulated if the steps were simulated."""
    return info.model if info.simulated is None else f"{info.model}, {SIMULATED}"


MAX_AUDIT = 20
_SILENT_NS = 1_000_000_000  # in this time an engine sends several messages of a step in flight

_ENDS = (wire.Finished, wire.FirstToken)
# Fields that a state and a snapshot have in common.
_AS_IN_SNAPSHOTS = (
    "step", "time_ns", "info", "knobs", "knobs_version", "state", "kv", "num_dropped", "workload",
    "workload_spec", "totals", "waiting_reasons", "control", "in_flight", "leased", "kv_groups",
    "kv_transfers",
)  # fmt: skip


@dataclass(slots=True)
class SessionState:
    """State of one engine as of the last message applied.

    `blocks` is None if the engine does not publish blocks. Readers must not change anything.
    """

    info: wire.EngineInfo | None = None
    knobs: dict[str, wire.KnobValue] = field(default_factory=dict)
    knobs_version: int = 0
    state: wire.EngineState = "idle"
    step: int = -1
    time_ns: int = 0  # engine time of the last message
    table: RequestTable = field(default_factory=RequestTable)
    blocks: BlockMap | None = None
    kv: wire.KVCounts | None = None
    kv_groups: list[wire.GroupCounts] | None = None  # replaced, not changed
    kv_transfers: wire.KVTransfers | None = None
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] | None = None
    num_dropped: int = 0
    workload: str | None = None
    workload_spec: dict[str, wire.KnobValue] | None = None  # replaced, not changed
    control: wire.ControlCounts | None = None  # what the engine's control socket dropped
    audit: list[wire.Audited] = field(default_factory=list)  # the last ones; replaced, not changed
    pauses: PauseTrail = PauseTrail()  # noqa: RUF009 - it is never changed
    in_flight: wire.StepInFlight | None = None  # a step that takes long and has not ended yet
    totals: wire.Totals | None = None  # of the last record, if the engine publishes only totals
    leased: wire.LeasedKnobs | None = None  # knobs that a client moves until it falls silent
    # Of events since the last step; the next step's outcome begins with it.
    between: Outcome | None = field(default=None, compare=False)

    # Copies

    def copy(self) -> "SessionState":
        other = copy.copy(self)
        other.table = self.table.copy()
        if self.blocks is not None:
            other.blocks = self.blocks.copy()
        other.between = copy.deepcopy(self.between)
        return other

    def copy_without_blocks(self) -> "SessionState":
        """Like `copy`, without the block map: large, and of no use to who follows waits."""
        other = copy.copy(self)
        other.blocks = None
        return other.copy()

    @property
    def requests(self) -> dict[int, wire.RequestView]:
        return self.table.views

    @property
    def block_owner(self) -> "array[int] | None":
        """Latest owner of each block: a request id, `CACHED` or `EMPTY`."""
        return None if self.blocks is None else self.blocks.owner

    @property
    def block_groups(self) -> bytearray | None:
        """Place of each block's group in `EngineInfo.kv_groups`; None if there is one group."""
        return None if self.blocks is None else self.blocks.groups

    def snapshot(self, sequence: int) -> wire.Snapshot | None:
        """This state as a `Snapshot` message with the sequence number after `sequence`.

        None if no `EngineInfo` is known yet.
        """
        if self.info is None:
            return None
        return wire.Snapshot(
            sequence=sequence,
            requests=[copy.copy(view) for view in self.requests.values()],
            blocks=None if self.blocks is None else self.blocks.runs(),
            block_groups=None if self.block_groups is None else bytes(self.block_groups),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            audit=self.audit or None,
            pauses=None if self.pauses.spans is None else self.pauses.published(),
            **{name: getattr(self, name) for name in _AS_IN_SNAPSHOTS},
        )

    @classmethod
    def from_snapshot(cls, snapshot: wire.Snapshot) -> "SessionState":
        """Build the state that a `Snapshot` message describes. The inverse of `snapshot`."""
        table = RequestTable(snapshot.requests)
        num_running, num_waiting = snapshot.num_running, snapshot.num_waiting
        if num_running is None:
            num_running = table.num_with_status("running")
        if num_waiting is None:
            num_waiting = table.num_with_status("waiting", "preempted")
        runs, groups = snapshot.blocks, snapshot.block_groups
        return cls(
            table=table,
            blocks=None if runs is None else BlockMap.from_runs(runs, groups),
            num_running=num_running,
            num_waiting=num_waiting,
            audit=snapshot.audit or [],
            pauses=PauseTrail.of(snapshot),
            **{name: getattr(snapshot, name) for name in _AS_IN_SNAPSHOTS},
        )

    @property
    def is_summed_up(self) -> bool:
        """Whether each record of this engine totals a time interval instead of one step."""
        return self.info is not None and self.info.totals_every_s is not None

    @property
    def is_load_known(self) -> bool:
        """Whether the engine published `num_running` and `num_waiting`."""
        return self.totals is None or self.totals.is_load_known

    @property
    def kv_share(self) -> float | None:
        """Share of the KV cache that requests hold, 0 to 1; None if unknown."""
        if self.kv is None:
            return None if self.totals is None else self.totals.kv_used
        return self.kv.used / self.kv.num_blocks if self.kv.num_blocks else None

    # Messages

    def is_replaced_by(self, message: wire.Telemetry) -> bool:
        """Whether a message introduces another engine, or this one after a restart."""
        info = message.info if isinstance(message, wire.Snapshot) else message
        if self.info is None or not isinstance(info, wire.EngineInfo):
            return False
        return info.engine_id != self.info.engine_id

    def apply(self, message: wire.Telemetry) -> Outcome | None:
        """Apply one message. Returns the outcome of a step, None for other messages."""
        if isinstance(message, wire.StepRecord):
            return self.take_step(message, message.batch)
        if isinstance(message, wire.EngineStatus):
            self._apply_status(message)
        elif isinstance(message, wire.StepInFlight):
            if message.step > self.step:  # otherwise its step has already ended
                self.in_flight = message
                self.time_ns = max(self.time_ns, message.time_ns)
        elif isinstance(message, wire.EngineInfo):
            if self.is_replaced_by(message):
                self._become(SessionState())
            self.info = message
            if message.num_blocks is None:
                self.blocks = None
        elif isinstance(message, wire.KnobsChanged):
            self.knobs = {**self.knobs, **message.new}
            self.knobs_version = message.version
            self.time_ns = max(self.time_ns, message.time_ns)
        elif isinstance(message, wire.Audited):
            self.audit = latest(reversed([*self.audit, message]), MAX_AUDIT)
        elif isinstance(message, wire.Snapshot):
            self._resync(message)
        return None

    def _apply_status(self, status: wire.EngineStatus) -> None:
        # An attached engine sends statuses during a step, too.
        flying = self.in_flight
        if flying is not None and (
            status.step >= flying.step or status.time_ns - flying.time_ns > _SILENT_NS
        ):
            self.in_flight = None
        self.time_ns = max(self.time_ns, status.time_ns)
        self.state = status.state
        self.pauses = self.pauses.after(status)
        if status.events:
            self.between = self.between or Outcome()
            for event in status.events:
                self.table.take_event(event, self.step, status.time_ns, self.between)
        self.table.hold(status.held or ())
        if status.front:
            self.between = self.between or Outcome()
            self.table.serve(status.front, self.pauses, self.between)
        self._apply_counts(status, is_start=status.step < 0)
        self.step = max(self.step, status.step)
        if not status.num_waiting:
            self.waiting_reasons = None if self.waiting_reasons is None else {}
        self.totals = status.totals or self.totals
        self.workload = status.workload
        self.workload_spec = status.workload_spec
        self.leased = status.leased
        self.control = status.control

    def take_step(self, record: wire.StepRecord, rows: list[wire.BatchRow] | None) -> Outcome:
        """Apply a step with only the given rows of its batch. Returns the outcome of these rows."""
        outcome, self.between = self.between or Outcome(), None
        table = self.table
        self.step = record.step
        self.in_flight = None
        last_ns, self.time_ns = self.time_ns, max(self.time_ns, record.tokens_ns)
        if self.state == "idle":
            self.state = "running"
        self.pauses = self.pauses.after(record)
        outcome.paused_ns = self.pauses.last_since(last_ns)
        ends: list[wire.RequestEvent] = []
        for event in record.events:
            # These events follow from the tokens that the rows below compute.
            if isinstance(event, _ENDS):
                ends.append(event)
            else:
                table.take_event(event, record.step, record.schedule_start_ns, outcome)
        self._count_lookups(record, outcome)
        if rows:
            table.take_rows(rows, record.tokens_ns, outcome)
        for event in ends:
            table.take_event(event, record.step, record.tokens_ns, outcome)
        table.hold(record.held or ())
        if record.front:
            table.serve(record.front, self.pauses, outcome)
        self._apply_counts(record, is_start=record.step == 0)
        self.waiting_reasons = record.waiting_reasons
        self.totals = record.totals
        table.forget_finished(record.step)
        return outcome

    def _count_lookups(self, record: wire.StepRecord, outcome: Outcome) -> None:
        """Set the tokens looked up in the prefix cache. Call it before the rows are applied."""
        if (kv := record.kv) is None:
            totals = record.totals or wire.Totals()
            outcome.num_queried_tokens = totals.num_queried_tokens
            outcome.num_hit_tokens = totals.num_cached_tokens
            return
        outcome.num_queried_tokens, outcome.num_hit_tokens = kv.queried_tokens, kv.hit_tokens
        admitted = [each for each in record.events if isinstance(each, wire.Admitted)]
        views = [self.requests[each.request_id] for each in admitted]
        if any(map(comes_back, views)) and not any(view.is_partial for view in views):
            # An older engine counts requests that come back, too.
            new = [view for view in views if not comes_back(view)]
            num_queried = sum(view.num_prompt_tokens for view in new)
            outcome.num_queried_tokens = min(kv.queried_tokens, num_queried)
            num_hit = sum(view.num_cached_tokens for view in new)
            outcome.num_hit_tokens = min(kv.hit_tokens, num_hit)

    def _apply_counts(
        self, message: wire.StepRecord | wire.EngineStatus, *, is_start: bool
    ) -> None:
        self.num_running, self.num_waiting = message.num_running, message.num_waiting
        self.num_dropped = message.num_dropped
        self.kv_groups, self.kv_transfers = message.kv_groups, message.kv_transfers
        self.kv = kv = message.kv
        has_map = self.info is None or self.info.num_blocks is not None
        if self.blocks is None and is_start and kv is not None and has_map:
            # Before its first step an engine holds no blocks, so moves from then on give the whole
            # map.
            has_groups = message.kv_groups is not None
            self.blocks = BlockMap.empty(kv.num_blocks, has_groups=has_groups)
        if self.blocks is not None:
            self.blocks.apply(message.moves, message.move_groups)

    def _resync(self, snapshot: wire.Snapshot) -> None:
        """Replace the state by a snapshot, but keep requests that ended shortly before it."""
        fresh = SessionState.from_snapshot(snapshot)
        if self.info is not None and self.info.engine_id == snapshot.info.engine_id:
            fresh.table.keep_ended(self.table, snapshot.step)
            fresh.pauses = fresh.pauses.joined(self.pauses)
        self._become(fresh)

    def _become(self, other: "SessionState") -> None:
        other.table.late_ns = self.table.late_ns
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


def request_name(request_id: int) -> str:
    """The name of a request in texts, such as `r17`."""
    return f"r{request_id}"
