"""Lanes: what each request did in each step, one byte a step, ready to be translated to glyphs.

A `LaneBoard` follows the messages of a stretch of steps and is asked for ranges of it. It belongs
to the reading side; `History` keeps one and extends it as steps come in.
"""

from enum import IntEnum
from typing import NamedTuple

from stepscope.engine.wire import (
    Aborted,
    Arrived,
    BatchRow,
    EngineStatus,
    Finished,
    Phase,
    Preempted,
    RequestEvent,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.session import SessionState

_DECODE_PHASE = int(Phase.DECODE)
_RECOMPUTE_PHASE = int(Phase.RECOMPUTE)


class Cell(IntEnum):
    """What a request did in a step, ordered so that the largest of several is the one to show."""

    ABSENT = 0  # not there yet, or not any more
    UNKNOWN = 1  # the record of the step was lost
    WAITING = 2
    IDLE = 3  # running, but left out of this step
    CACHED = 4  # admitted, most of it skipped by a prefix hit
    DECODE = 5
    DECODE_MULTI = 6  # several tokens at once
    PREFILL = 7
    PREFILL_ALT = 8  # also prefill: tells a chunk from the one before
    RECOMPUTE = 9  # prefill again, after a preemption
    RECOMPUTE_ALT = 10
    FINISHED = 11
    ABORTED = 12
    PREEMPTED = 13


_ABSENT, _UNKNOWN, _WAITING, _IDLE = (
    bytes((cell,)) for cell in (Cell.ABSENT, Cell.UNKNOWN, Cell.WAITING, Cell.IDLE)
)


class Lane(NamedTuple):
    """One request over a range of steps. `cells` has one `Cell` a step; `bytes.translate` it."""

    request_id: int
    client_id: str
    cells: bytes


class _Track:
    """A lane as it grows. `cells[0]` is at step `start`; steps not written yet are `filler`."""

    __slots__ = ("cells", "client_id", "filler", "is_open", "start")

    def __init__(self, client_id: str, start: int, filler: bytes) -> None:
        self.client_id = client_id
        self.start = start
        self.cells = bytearray()
        self.filler = filler
        self.is_open = True

    def fill_to(self, step: int, filler: bytes) -> None:
        """Write the steps before `step` that are still open."""
        missing = step - self.start - len(self.cells)
        if missing > 0:
            self.cells += filler * missing

    def put(self, step: int, cell: int) -> None:
        self.fill_to(step, self.filler)
        position = step - self.start
        if position == len(self.cells):
            self.cells.append(cell)
        elif 0 <= position < len(self.cells):
            self.cells[position] = cell


class LaneBoard:
    """Lanes of the steps [first, end).

    Args:
        state: as it was just before step `first`.
        first: the first step that will be fed.
        next_number: kept for who feeds it: which message is next.
    """

    def __init__(self, state: SessionState, first: int, next_number: int) -> None:
        self.next_number = next_number
        self.first = first
        self.end = first
        self._tracks: dict[int, _Track] = {}
        for request_id, view in state.requests.items():
            if view.status != "finished":
                filler = _IDLE if view.status == "running" else _WAITING
                self._tracks[request_id] = _Track(view.client_id, first, filler)

    def extend(self, message: Telemetry) -> None:
        """Take the next message of the session."""
        if isinstance(message, StepRecord):
            self._extend_step(message)
        elif isinstance(message, EngineStatus):
            # What happens between two steps shows where it takes effect: an arrival in the step
            # to come, an end in the step before.
            for event in message.events:
                self._take(event, max(self.end - 1, self.first), self.end)
        elif isinstance(message, Snapshot):
            live = {v.request_id for v in message.requests if v.status != "finished"}
            for request_id, track in self._tracks.items():
                if request_id not in live:
                    track.is_open = False

    def view(self, first: int, last: int) -> list[Lane]:
        """Lanes of the steps [first, last] that show anything there, by request id."""
        lanes = []
        for request_id in sorted(self._tracks):
            track = self._tracks[request_id]
            if track.is_open:
                track.fill_to(min(last + 1, self.end), track.filler)
            begin = first - track.start
            cells = _ABSENT * min(-begin, last + 1 - first) if begin < 0 else b""
            cells += bytes(track.cells[max(begin, 0) : max(last + 1 - track.start, 0)])
            cells = cells.ljust(last + 1 - first, _ABSENT)
            if cells.count(0) != len(cells):
                lanes.append(Lane(request_id, track.client_id, cells))
        return lanes

    def forget_before(self, step: int) -> None:
        """Let go of the steps before `step`."""
        self.first = step
        gone = []
        for request_id, track in self._tracks.items():
            if track.is_open:
                track.fill_to(self.end, track.filler)
            num_old = step - track.start
            if num_old > 0:
                del track.cells[:num_old]
                track.start = step
            if not track.is_open and not track.cells:
                gone.append(request_id)
        for request_id in gone:
            del self._tracks[request_id]

    def _extend_step(self, record: StepRecord) -> None:
        step = record.step
        if step > self.end:
            for track in self._tracks.values():
                if track.is_open:
                    track.fill_to(self.end, track.filler)
                    track.fill_to(step, _UNKNOWN)
        self.end = step + 1
        ends = []
        for event in record.events:
            if isinstance(event, Finished):
                ends.append(event)
            else:
                self._take(event, step, step)
        tracks = self._tracks
        for row in record.batch or ():
            seated = tracks.get(row.request_id)
            if seated is None:
                seated = tracks[row.request_id] = _Track("", step, _IDLE)
            seated.is_open = True
            seated.put(step, _cell(row, step))
            seated.filler = _IDLE  # only now: what was open before this step was a wait
        for event in ends:
            self._take(event, step, step)

    def _take(self, event: RequestEvent, step: int, arrival_step: int) -> None:
        track = self._tracks.get(event.request_id)
        if isinstance(event, Arrived):
            if track is None:
                self._tracks[event.request_id] = _Track(event.client_id, arrival_step, _WAITING)
            return
        if track is None or not track.is_open:
            return
        if isinstance(event, Preempted):
            track.put(step, Cell.PREEMPTED)
            track.filler = _WAITING
        elif isinstance(event, Finished | Aborted):
            track.put(step, Cell.ABORTED if isinstance(event, Aborted) else Cell.FINISHED)
            track.is_open = False


def _cell(row: BatchRow, step: int) -> int:
    if row.phase == _DECODE_PHASE:
        return Cell.DECODE if row.num_tokens == 1 else Cell.DECODE_MULTI
    if row.num_cached_tokens >= row.num_tokens:
        return Cell.CACHED
    if row.phase == _RECOMPUTE_PHASE:
        return Cell.RECOMPUTE_ALT if step & 1 else Cell.RECOMPUTE
    return Cell.PREFILL_ALT if step & 1 else Cell.PREFILL
