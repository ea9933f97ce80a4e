"""`Index`: the rows of a stretch of a session, which a recording keeps beside its messages.

With them a whole file is searched and summed up without decoding its messages. `PackedColumn`: a
column of whole numbers in few bytes. Numbers are stored as differences: to the number before, to
the number of another column in the same row, or to the least number. Of these, the one is taken
that compresses best. The bytes are stored by place: first the lowest byte of every number, then the
next one, so that alike bytes are neighbours.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple, get_args

import msgspec
import zstandard

from stepscope.engine.protocol import wire
from stepscope.recordings.session.steps import COLUMNS, UNKNOWN, StepTable
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.lazy_numpy import Ints, np

_MASK = (1 << 64) - 1


class PackedColumn(msgspec.Struct, array_like=True, frozen=True):
    """A column: number i is `base` plus unsigned number i of `planes`, plus what it differs from.

    All sums are modulo 2^64, and the result is a signed number.

    `start`: if given, each number is a difference to the number before it, and this is the one
    before the first.
    """

    base: int
    width: int  # bytes of each number in `planes`, 0 to 8, lowest byte first
    planes: bytes
    start: int | None = None
    beside: str = ""  # the column that each number is a difference to; "" for none


def pack(values: Ints, near: Mapping[str, Ints]) -> PackedColumn:
    """Pack a column. `near`: columns that its numbers may be close to, by name."""
    packed = [_packed(values), *(_packed(values - near[name], beside=name) for name in near)]
    if len(values) > 1:
        steps = np.diff(values)
        least = int(steps.min())
        start = (int(values[0]) - least) & _MASK
        packed.append(_packed(np.concatenate(([least], steps)), start=start))
    return min(packed, key=lambda each: len(zstandard.compress(each.planes, 1)))


def unpack(column: PackedColumn, number: int, beside: Ints | None) -> Ints:
    """The numbers of a column.

    `beside`: the column that they are differences to, if there is one.

    Raises ValueError: it was not packed from so many numbers.
    """
    planes = np.frombuffer(column.planes, dtype=np.uint8).reshape(column.width, number)
    wide = np.zeros((number, 8), dtype=np.uint8)
    wide[:, : column.width] = planes.T
    values = wide.view("<u8").reshape(number) + np.uint64(column.base & _MASK)
    if column.start is not None:
        values = np.cumsum(values, dtype=np.uint64) + np.uint64(column.start)
    found = values.view(np.int64)
    return found if beside is None else found + beside


def _packed(values: Ints, start: int | None = None, beside: str = "") -> PackedColumn:
    base = int(values.min()) if len(values) else 0
    above = values.view(np.uint64) - np.uint64(base & _MASK)
    width = (int(above.max()).bit_length() + 7) // 8 if len(values) else 0
    planes = above.astype("<u8").view(np.uint8).reshape(len(values), 8)[:, :width].T.tobytes()
    return PackedColumn(base, width, planes, start, beside)


INDEX_VERSION = 2
MAX_INDEX_BYTES = 1 << 28  # decompressed
KINDS: tuple[LatencyKind, ...] = get_args(LatencyKind)
# Columns of the two other tables, and what they mean.
WAIT_COLUMNS = {
    "place": "row of the step in which the wait ended",
    "kind": ", ".join(f"{place} {kind}" for place, kind in enumerate(KINDS[:-1])),
    "ns": "its length, without the operator's pauses",
    "number": "how many requests waited so long",
    "request_id": "one of them; −1 of estimates, and of gaps between chunks",
}
FINISHED_COLUMNS = {
    "place": "row of the step in which a request ended that was seen from its arrival on",
    "ttft_ns": "its time to first token",
    "worst_itl_ns": "its longest gap between two tokens",
}

# Columns that follow from the waits.
_OF_WAITS = ("max_itl_ns", "max_itl_request_id", "max_ttft_ns", "max_ttft_request_id")
STORED_COLUMNS = tuple(name for name in COLUMNS if name not in _OF_WAITS)
# Older files lack them.
OPTIONAL_COLUMNS = frozenset({"waited_rank", "rank_wait_ns"})


_NONE_KNOWN = PackedColumn(UNKNOWN, 0, b"")


class Lost(NamedTuple):
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
        pauses: begin and end of the operator's pauses that ended, in engine time.
        between: how many requests arrived, finished and were preempted after its last step.
    """

    version: int = INDEX_VERSION
    tables: dict[str, tuple[int, dict[str, PackedColumn]]] = {}
    noted: list[tuple[int, int, wire.RequestEvent]] = []
    said: list[tuple[int, wire.Mark | wire.KnobsChanged | wire.Audited]] = []
    lost: list[Lost] = []
    pauses: list[tuple[int, int]] = []
    open: list[Open] = []
    between: tuple[int, int, int] = (0, 0, 0)

    def encode(self) -> bytes:
        return zstandard.compress(msgspec.msgpack.encode(self), 6)


_decoder = msgspec.msgpack.Decoder(Index)


def decode_index(payload: bytes) -> Index:
    """Raises ValueError: it is damaged, or has other columns than this version."""
    try:
        if zstandard.frame_content_size(payload) > MAX_INDEX_BYTES:
            raise ValueError("an index beyond all measure")
        index = _decoder.decode(zstandard.decompress(payload))
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    _, steps = index.tables.get("steps", (0, {}))
    if index.version != INDEX_VERSION or steps.keys() | OPTIONAL_COLUMNS != set(STORED_COLUMNS):
        raise ValueError(f"an index of version {index.version} with {len(steps)} columns")
    return index


class IndexRows:
    """The tables of an index, unpacked as they are asked for.

    Args:
        known: by table and name, columns that need not be unpacked.
        steps: the table of steps, if it need not be made from columns.

    Raises, wherever it is read:
        ValueError, LookupError: the index is damaged.
    """

    def __init__(
        self,
        index: Index,
        known: dict[str, dict[str, Ints]] | None = None,
        steps: StepTable | None = None,
    ) -> None:
        self._tables = index.tables
        self._found = known or {}
        self._steps = steps

    def column(self, table: str, name: str) -> Ints:
        """A stored column; `UNKNOWN` where a value is unknown."""
        found = self._found.setdefault(table, {})
        if name not in found:
            number, columns = self._tables[table]
            packed = _NONE_KNOWN if name in OPTIONAL_COLUMNS - columns.keys() else columns[name]
            beside = self._beside(table, packed.beside) if packed.beside else None
            found[name] = unpack(packed, number, beside)
        return found[name]

    def _beside(self, table: str, name: str) -> Ints:
        if name == "interval_ns":
            return intervals(self.column("steps", "tokens_ns"))[self.column("waits", "place")]
        column = self.column("steps", name)
        return column if table == "steps" else column[self.column(table, "place")]

    def longest(self, kind: LatencyKind) -> tuple[Ints, Ints, Ints, Ints]:
        """The longest wait of each step in which some ended.

        Place of the step, nanoseconds, request, and how many requests waited exactly so long.
        """
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
        return places, ns[longest], request_id[longest], numbers.astype(np.int64)

    def steps(self) -> StepTable:
        if self._steps is not None:
            return self._steps
        columns = {
            name: array("q", self.column("steps", name).tobytes()) for name in STORED_COLUMNS
        }
        kinds: tuple[LatencyKind, ...] = ("itl", "ttft")
        for kind in kinds:
            places, ns, request_ids, _ = self.longest(kind)
            for name, values in ((f"max_{kind}_ns", ns), (f"max_{kind}_request_id", request_ids)):
                column = np.full(len(columns["step"]), UNKNOWN)
                column[places] = values
                columns[name] = array("q", column.tobytes())
        self._steps = StepTable([columns[name] for name in COLUMNS])
        return self._steps


def intervals(tokens_ns: Ints) -> Ints:
    return np.diff(tokens_ns, prepend=tokens_ns[:1])
