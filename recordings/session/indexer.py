"""`Indexer`: makes indexes from the messages of one engine, and knows its state on the way.

`NewRows`: the rows of steps as they come, in the tables of an index.
"""

from collections.abc import Iterable, Mapping

import msgspec

from stepscope.engine.protocol import wire
from stepscope.recordings.session.index import (
    FINISHED_COLUMNS,
    KINDS,
    STORED_COLUMNS,
    WAIT_COLUMNS,
    Index,
    IndexRows,
    Lost,
    Open,
    intervals,
    pack,
)
from stepscope.recordings.session.steps import UNKNOWN, StepTable
from stepscope.recordings.state.clocks import back_by, known_since, leave_out, lost_before, set_back
from stepscope.recordings.state.latency import waits_in
from stepscope.recordings.state.latency_samples import RequestWatch, bounded
from stepscope.recordings.state.lazy_numpy import Ints, np
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.session import SessionState


class NewRows:
    def __init__(self) -> None:
        self._steps = StepTable()
        self._waits: list[tuple[int, ...]] = []
        self._finished: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, applied: AppliedStep) -> None:
        """Add a step, the waits and the requests that ended in it.

        Its waits are without the operator's pauses, and `RequestWatch` added the requests.
        """
        place = len(self._steps)
        for kind, ns, number, request_id in waits_in(applied):
            of = UNKNOWN if request_id is None else bounded(request_id)
            self._waits.append((place, KINDS.index(kind), bounded(ns), number, of))
        for each in applied.outcome.finished:
            self._finished.append((place, bounded(each.ttft_ns), bounded(each.worst_itl_ns)))
        self._steps.append(applied)

    def tables(self) -> dict[str, dict[str, Ints]]:
        """Table -> name -> column. Append no more steps while they are in use."""
        tables = {"steps": {name: self._steps.values(name) for name in STORED_COLUMNS}}
        for table, names, rows in (
            ("waits", WAIT_COLUMNS, self._waits),
            ("finished", FINISHED_COLUMNS, self._finished),
        ):
            columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
            tables[table] = dict(zip(names, np.ascontiguousarray(columns), strict=True))
        return tables

    def rows(self) -> IndexRows:
        """The tables as those of an index. Append no more steps."""
        return IndexRows(Index(), self.tables(), self._steps)


# Columns, and those that each is likely to be close to.
_NEAR: Mapping[str, tuple[str, ...]] = {
    "sequence": ("step",),
    "schedule_end_ns": ("schedule_start_ns",),
    "launch_ns": ("schedule_end_ns", "schedule_start_ns"),
    "tokens_ns": ("launch_ns", "schedule_start_ns"),
    "num_output_tokens": ("num_decode_tokens",),
    "num_rows": ("num_decode_tokens",),
    "num_decode_rows": ("num_decode_tokens",),
    "num_running": ("num_rows",),
}
_NOTED = wire.Preempted | wire.Aborted | wire.Rejected


class Indexer:
    """Follows the messages of one engine, and makes indexes of what they tell.

    Belongs to one thread.

    Args:
        sequence: the number of the message that led to this state; None if there was none.
        since_ns: engine time since when pauses are known; None: since the first snapshot.
        open: the requests of which all is known, from the index before.

    Attributes:
        sequence: the number of the last message; None before the first.
        needs_snapshot: whether messages are missing and no snapshot has corrected the state since.
    """

    def __init__(
        self,
        state: SessionState | None = None,
        sequence: int | None = None,
        since_ns: int | None = None,
        open: Iterable[Open] = (),
    ) -> None:
        self.state = state or SessionState()
        self.sequence = sequence
        self._since_ns = since_ns
        self.needs_snapshot = False
        self._last_step, self._last_ns = self.state.step, 0
        self._trail = self.state.pauses
        self._watch = RequestWatch(0.0, self.state)
        self.follow(open)
        self._begin()

    def _begin(self) -> None:
        self._rows = NewRows()
        self._index = Index()  # without its rows

    def follow(self, open: Iterable[Open]) -> None:
        """Follow these requests, of which an earlier index tells, and new ones; no others."""
        self._watch.begin(self.state)
        self._watch.go_on_with(open)

    @property
    def num_steps(self) -> int:
        return len(self._rows)

    def take(self, sequence: int, message: wire.Telemetry) -> None:
        """Follow the next message; one that was told before changes nothing."""
        if isinstance(message, wire.Mark):
            self._index.said.append((max(self.state.step, 0), message))
            return
        if not self._is_next(sequence, message):
            return
        if isinstance(message, wire.StepRecord):
            if message.step > self._last_step:
                self._take_step(sequence, message)
        else:
            self.state.apply(message)
        if isinstance(message, wire.EngineStatus):
            self._note(message.events, max(message.step, 0), message.time_ns)
        elif isinstance(message, wire.KnobsChanged | wire.Audited):
            self._index.said.append((max(self.state.step, 0), message))
        elif isinstance(message, wire.Snapshot):
            self._last_step = max(self._last_step, message.step)
            if self._since_ns is None:
                self._since_ns = known_since(message)
        if self.state.pauses is not self._trail:
            self._note_pauses()

    def _note_pauses(self) -> None:
        before, self._trail = self._trail, self.state.pauses
        known = {span.start_ns for span in before.spans or () if span.end_ns is not None}
        for span in self._trail.spans or ():
            if span.end_ns is not None and span.start_ns not in known:
                self._index.pauses.append((span.start_ns, span.end_ns))

    def _take_step(self, sequence: int, record: wire.StepRecord) -> None:
        if back_ns := back_by(self._last_ns, record):
            self.state = set_back(self.state, back_ns)
            self._watch.begin(self.state)
        self._last_step, self._last_ns = record.step, record.tokens_ns
        state = self.state
        outcome = state.apply(record)
        assert outcome is not None
        leave_out(outcome, state, record.tokens_ns, self._since_ns or 0)
        self._watch.take(outcome, state, record.tokens_ns)
        self._note(record.events, record.step, record.tokens_ns)
        self._rows.append(AppliedStep(sequence, record, outcome, not state.is_summed_up))

    def _note(self, events: list[wire.RequestEvent], step: int, time_ns: int) -> None:
        for event in events:
            if isinstance(event, _NOTED) and not any(
                at == step and type(other) is type(event) for at, _, other in self._index.noted[-3:]
            ):
                self._index.noted.append((step, time_ns, event))

    def _is_next(self, sequence: int, message: wire.Telemetry) -> bool:
        num_lost = lost_before(sequence, message, self.sequence, is_unsure=self.needs_snapshot)
        if num_lost is None:
            return False
        self.sequence = sequence
        is_snapshot = isinstance(message, wire.Snapshot)
        self.needs_snapshot = not is_snapshot and (self.needs_snapshot or num_lost > 0)
        if num_lost:
            self._index.lost.append(Lost(num_lost, self._last_step, self.state.time_ns))
            self._watch.begin(self.state)
        return True

    def cut(self) -> Index:
        """The index of all since the last call."""
        tables = self._rows.tables()
        steps, waits = tables["steps"], tables["waits"]
        interval_ns = intervals(steps["tokens_ns"])[waits["place"]]
        decoded = {"num_decode_tokens": steps["num_decode_tokens"][waits["place"]]}
        near = {"ns": {"interval_ns": interval_ns}, "number": decoded}
        between = self.state.between or Outcome()
        near |= {name: {each: steps[each] for each in _NEAR[name]} for name in _NEAR}
        index = msgspec.structs.replace(
            self._index,
            tables={
                table: (
                    len(next(iter(columns.values()))),
                    {name: pack(column, near.get(name, {})) for name, column in columns.items()},
                )
                for table, columns in tables.items()
            },
            open=[Open(*each) for each in self._watch.open()],
            between=(between.num_arrived, between.num_finished, between.num_preempted),
        )
        self._begin()
        return index
