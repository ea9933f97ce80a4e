"""`Index`: the rows of a stretch of a session, which a recording keeps beside its messages.

With them a whole file is searched and summed up without decoding its messages.

`Indexer`: makes the rows from the messages of one engine. It is also what a recorder knows of it.
"""

from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
import zstandard

from stepscope.engine.protocol.wire import (
    Aborted,
    Audited,
    EngineStatus,
    KnobsChanged,
    Mark,
    Preempted,
    Rejected,
    RequestEvent,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.session.packed import PackedColumn, pack, unpack
from stepscope.recordings.session.steps import COLUMNS, UNKNOWN, StepTable
from stepscope.recordings.state.clocks import back_by, known_since, leave_out, set_back
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.series.finished import RequestWatch
from stepscope.recordings.state.series.latency import LatencyKind, estimates_in
from stepscope.recordings.state.series.latency_samples import bounded
from stepscope.recordings.state.session import SessionState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX_VERSION = 1
MAX_INDEX_BYTES = 1 << 28  # decompressed
KINDS: tuple[LatencyKind, ...] = get_args(LatencyKind)
# Columns of the two other tables, and what they mean.
WAIT_COLUMNS = {
    "place": "row of the step in which the wait ended",
    "kind": ", ".join(f"{place} {kind}" for place, kind in enumerate(KINDS[:-1])),
    "ns": "its length, without the operator's pauses",
    "number": "how many requests waited so long",
    "request_id": "one of them; −1 if the engine publishes estimates alone",
}
FINISHED_COLUMNS = {
    "place": "row of the step in which a request ended that was seen from its arrival on",
    "ttft_ns": "its time to first token",
    "worst_itl_ns": "its longest gap between two tokens",
}

# Columns that follow from the waits, and those that each is likely to be close to.
_OF_WAITS = ("max_itl_ns", "max_itl_request_id", "max_ttft_ns", "max_ttft_request_id")
STORED_COLUMNS = tuple(name for name in COLUMNS if name not in _OF_WAITS)
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
_NOTED = Preempted | Aborted | Rejected


class Lost(NamedTuple):
    """Messages that were lost and could not be requested again."""

    num_messages: int
    after_step: int  # the last step before them; -1 if there was none
    time_ns: int  # of the engine


class Open(NamedTuple):
    """A request that was seen from its arrival and has not ended: its waits so far."""

    request_id: int
    ttft_ns: int
    worst_itl_ns: int


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a stretch of a session.

    Attributes:
        tables: by name ("steps", "waits", "finished"), the number of rows and the columns.
        noted: step, engine time and event: of preempted, aborted and rejected requests, the first
            of each kind in each step.
        said: marks, changes of knobs and other commands, each with the step before it.
        lost: messages that are missing.
        pauses: begin and end of the operator's pauses that ended, in engine time.
        open: requests that had not ended at its end.
        between: how many requests arrived, finished and were preempted after its last step.
    """

    version: int = INDEX_VERSION
    tables: dict[str, tuple[int, dict[str, PackedColumn]]] = {}
    noted: list[tuple[int, int, RequestEvent]] = []
    said: list[tuple[int, Mark | KnobsChanged | Audited]] = []
    lost: list[Lost] = []
    pauses: list[tuple[int, int]] = []
    open: list[Open] = []
    between: tuple[int, int, int] = (0, 0, 0)

    def encode(self) -> bytes:
        """As bytes for a file."""
        return zstandard.compress(msgspec.msgpack.encode(self), 6)


_decoder = msgspec.msgpack.Decoder(Index)


def decode_index(payload: bytes) -> Index:
    """Decode an index.

    Raises:
        ValueError: it is damaged or of a later version.
    """
    try:
        if zstandard.frame_content_size(payload) > MAX_INDEX_BYTES:
            raise ValueError("an index beyond all measure")
        index = _decoder.decode(zstandard.decompress(payload))
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if index.version != INDEX_VERSION:
        raise ValueError(f"an index of version {index.version}")
    return index


class LongestWaits(NamedTuple):
    """The longest waits of steps, in columns."""

    places: "NDArray[np.int64]"  # of the steps
    ns: "NDArray[np.int64]"
    request_ids: "NDArray[np.int64]"
    numbers: "NDArray[np.int64]"  # requests that waited exactly so long


class IndexRows:
    """The tables of an index, unpacked as they are asked for.

    Raises, wherever it is read:
        ValueError, LookupError: the index is damaged.
    """

    def __init__(self, index: Index) -> None:
        self._tables = index.tables
        self._found: dict[tuple[str, str], NDArray[np.int64]] = {}

    def number(self, table: str) -> int:
        return self._tables[table][0]

    def column(self, table: str, name: str) -> "NDArray[np.int64]":
        """A stored column; `UNKNOWN` where a value is unknown."""
        if (table, name) not in self._found:
            number, columns = self._tables[table]
            packed = columns[name]
            near = {}
            if packed.beside == "interval_ns":
                near = {"interval_ns": self._interval_ns}
            elif packed.beside:
                near = {packed.beside: self._beside(table, packed.beside)}
            self._found[table, name] = unpack(packed, number, near)
        return self._found[table, name]

    def _beside(self, table: str, name: str) -> "NDArray[np.int64]":
        if table == "steps":
            return self.column("steps", name)
        return self.column("steps", name)[self.column(table, "place")]

    @cached_property
    def _interval_ns(self) -> "NDArray[np.int64]":
        return _intervals(self.column("steps", "tokens_ns"))[self.column("waits", "place")]

    def longest(self, kind: LatencyKind) -> "LongestWaits":
        """The longest wait of each step in which some ended."""
        import numpy as np

        place, ns, number, request_id = (
            self.column("waits", name) for name in ("place", "ns", "number", "request_id")
        )
        chosen = (self.column("waits", "kind") == KINDS.index(kind)) & (request_id != UNKNOWN)
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((-ns[rows], place[rows]))]  # stable: of equal waits the first
        places, firsts, step_of = np.unique(place[rows], return_index=True, return_inverse=True)
        longest = rows[firsts]
        alike = ns[rows] == ns[longest][step_of]
        numbers = np.bincount(step_of[alike], weights=number[rows][alike], minlength=len(places))
        return LongestWaits(places, ns[longest], request_id[longest], numbers.astype(np.int64))

    def steps(self) -> StepTable:
        """The table of steps."""
        import numpy as np

        columns = {
            name: array("q", self.column("steps", name).tobytes()) for name in STORED_COLUMNS
        }
        kinds: tuple[LatencyKind, ...] = ("itl", "ttft")
        for kind in kinds:
            places, ns, request_ids, _ = self.longest(kind)
            for name, values in ((f"max_{kind}_ns", ns), (f"max_{kind}_request_id", request_ids)):
                column = np.full(self.number("steps"), UNKNOWN)
                column[places] = values
                columns[name] = array("q", column.tobytes())
        return StepTable([columns[name] for name in COLUMNS])


class Indexer:
    """Follows the messages of one engine, and makes indexes of what they tell.

    Belongs to one thread.

    Args:
        state: the state before the first message.
        sequence: the number of the message that led to this state; None if there was none.
        since_ns: engine time since when pauses are known; None: since the first snapshot.
        open: the requests of which all is known, from the index before.

    Attributes:
        state: the state after the last message. Only the indexer may change it.
        sequence: the number of the last message; None before the first.
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
        self._needs_snapshot = False
        self._last_step, self._last_ns = self.state.step, 0
        self._trail = self.state.pauses
        self._watch = RequestWatch(0.0)
        self.follow(open)
        self._begin()

    def _begin(self) -> None:
        self._steps = StepTable()
        self._waits = [array("q") for _ in WAIT_COLUMNS]
        self._finished = [array("q") for _ in FINISHED_COLUMNS]
        self._noted: list[tuple[int, int, RequestEvent]] = []
        self._said: list[tuple[int, Mark | KnobsChanged | Audited]] = []
        self._lost: list[Lost] = []
        self._pauses: list[tuple[int, int]] = []

    def follow(self, open: Iterable[Open]) -> None:
        """Follow these requests, of which an earlier index tells, and new ones; no others."""
        self._watch.begin(self.state)
        self._watch.go_on_with(open)

    @property
    def num_steps(self) -> int:
        """Number of steps in the next index."""
        return len(self._steps)

    def take(self, sequence: int, message: Telemetry) -> None:
        """Follow the next message; one that was told before changes nothing."""
        if isinstance(message, Mark):
            self._said.append((max(self.state.step, 0), message))
            return
        if not self._is_next(sequence, message):
            return
        if isinstance(message, StepRecord):
            if message.step > self._last_step:
                self._take_step(sequence, message)
        else:
            self._take_other(message)
        if self.state.pauses is not self._trail:
            self._note_pauses()

    def _note_pauses(self) -> None:
        before, self._trail = self._trail, self.state.pauses
        known = {span.start_ns for span in before.spans or () if span.end_ns is not None}
        for span in self._trail.spans or ():
            if span.end_ns is not None and span.start_ns not in known:
                self._pauses.append((span.start_ns, span.end_ns))

    def _take_other(self, message: Telemetry) -> None:
        self.state.apply(message)
        if isinstance(message, EngineStatus):
            self._note(message.events, max(message.step, 0), message.time_ns)
        elif isinstance(message, KnobsChanged | Audited):
            self._said.append((max(self.state.step, 0), message))
        elif isinstance(message, Snapshot):
            self._last_step = max(self._last_step, message.step)
            if self._since_ns is None:
                self._since_ns = known_since(message)

    def _take_step(self, sequence: int, record: StepRecord) -> None:
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
        self._add_waits(record, outcome)
        num_rows = None if record.batch is None else len(record.batch)
        self._steps.append(AppliedStep(sequence, record, outcome, num_rows, not state.is_summed_up))

    def _add_waits(self, record: StepRecord, outcome: Outcome) -> None:
        place = len(self._steps)
        rows = [
            ("itl", ns, number, outcome.gap_request_ids[ns])
            for ns, number in outcome.gaps_ns.items()
        ]
        for kind, waits in (
            ("ttft", outcome.ttft_ns), ("tpot", outcome.tpot_ns), ("e2e", outcome.e2e_ns)
        ):  # fmt: skip
            rows += [(kind, ns, 1, request_id) for request_id, ns in waits]
        if record.totals is not None:
            rows += [(*estimate, UNKNOWN) for estimate in estimates_in(record.totals)]
        for kind, ns, number, request_id in rows:
            values = place, KINDS.index(kind), bounded(ns), number, bounded(request_id)
            for column, value in zip(self._waits, values, strict=True):
                column.append(value)
        for each in outcome.finished:
            for column, value in zip(
                self._finished, (place, each.ttft_ns, each.worst_itl_ns), strict=True
            ):
                column.append(bounded(value))

    def _note(self, events: list[RequestEvent], step: int, time_ns: int) -> None:
        for event in events:
            if isinstance(event, _NOTED) and not any(
                at == step and type(other) is type(event) for at, _, other in self._noted[-3:]
            ):
                self._noted.append((step, time_ns, event))

    def _is_next(self, sequence: int, message: Telemetry) -> bool:
        """Whether a message is new. Notes those that are missing before it."""
        last, self.sequence = self.sequence, max(sequence, self.sequence or 0)
        if last is None:
            return True
        if isinstance(message, Snapshot):
            is_new = sequence > last or (sequence == last and self._needs_snapshot)
            num_lost = sequence - last  # it stands for messages that never came
            self._needs_snapshot = self._needs_snapshot and not is_new
        else:
            is_new, num_lost = sequence > last, sequence - last - 1
            self._needs_snapshot = self._needs_snapshot or num_lost > 0
        if num_lost > 0:
            self._lost.append(Lost(num_lost, self._last_step, self.state.time_ns))
            self._watch.begin(self.state)
        return is_new

    def cut(self) -> Index:
        """The index of all since the last call."""
        import numpy as np

        def numbers(column: "array[int]") -> "NDArray[np.int64]":
            return np.frombuffer(column, dtype=np.int64)

        steps = {name: numbers(self._steps.column(name)) for name in STORED_COLUMNS}
        waits = dict(zip(WAIT_COLUMNS, map(numbers, self._waits), strict=True))
        finished = dict(zip(FINISHED_COLUMNS, map(numbers, self._finished), strict=True))
        interval_ns = _intervals(steps["tokens_ns"])[waits["place"]]
        decoded = {"num_decode_tokens": steps["num_decode_tokens"][waits["place"]]}
        near = {"ns": {"interval_ns": interval_ns}, "number": decoded}
        between = self.state.between or Outcome()
        index = Index(
            tables={
                "steps": (
                    len(self._steps),
                    {
                        name: pack(column, {each: steps[each] for each in _NEAR.get(name, ())})
                        for name, column in steps.items()
                    },
                ),
                "waits": (
                    len(waits["place"]),
                    {name: pack(column, near.get(name, {})) for name, column in waits.items()},
                ),
                "finished": (
                    len(finished["place"]),
                    {name: pack(column, {}) for name, column in finished.items()},
                ),
            },
            noted=self._noted,
            said=self._said,
            lost=self._lost,
            pauses=self._pauses,
            open=[Open(*each) for each in self._watch.open()],
            between=(between.num_arrived, between.num_finished, between.num_preempted),
        )
        self._begin()
        return index


def _intervals(tokens_ns: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The time from each step's tokens to the next ones."""
    import numpy as np

    return np.diff(tokens_ns, prepend=tokens_ns[:1])
