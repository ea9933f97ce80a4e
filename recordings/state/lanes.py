"""Lanes: what each request did in each step, one byte (`Cell`) per step, to be drawn as glyphs.

A `LaneBoard` follows the messages of a session and returns the lanes of any range of steps. It
grows with each message: one byte per step and request is cheap to keep, while decoding the records
of a range of steps again would take far longer.

`Track`: the lane of one request while it grows. `LaneBoard` owns it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.recordings.state.session import SessionState


@dataclass(slots=True, eq=False)
class Track:
    """The cells of one request so far, one byte per step. `cells[0]` is for step `start`.

    Steps that are not written yet count as `filler`.
    """

    client_id: str
    start: int
    filler: bytes
    cells: bytearray = field(default_factory=bytearray)

    def fill_to(self, step: int, filler: bytes) -> None:
        """Write `filler` to all steps before `step` that are not written yet."""
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

    def forget_before(self, step: int) -> None:
        num_old = step - self.start
        if num_old > 0:
            self.fill_to(step, self.filler)
            del self.cells[:num_old]
            self.start = step


_PAGE_STEPS = 256
_ENDS = (wire.Finished, wire.Aborted)
_DECODE_PHASE = int(wire.Phase.DECODE)
_RECOMPUTE_PHASE = int(wire.Phase.RECOMPUTE)


class Cell(IntEnum):
    """What a request did in a step. If several steps share a glyph, the largest value is shown."""

    ABSENT = 0  # before its arrival or after its end
    UNKNOWN = 1  # the record of the step was lost
    WAITING = 2
    IDLE = 3  # running, but left out of this step
    CACHED = 4  # admitted, and most of it skipped by a prefix hit
    DECODE = 5
    DECODE_MULTI = 6  # several tokens at once
    PREFILL = 7
    PREFILL_ALT = 8  # also prefill, to tell one chunk from the next
    RECOMPUTE = 9  # prefill again, after a preemption
    RECOMPUTE_ALT = 10
    FINISHED = 11
    ABORTED = 12
    PREEMPTED = 13


_ABSENT, _UNKNOWN, _WAITING, _IDLE = (
    bytes((cell,)) for cell in (Cell.ABSENT, Cell.UNKNOWN, Cell.WAITING, Cell.IDLE)
)
_DECODE = int(Cell.DECODE)


class LaneName(NamedTuple):
    request_id: int
    client_id: str


class LaneBoard:
    """Lanes of the steps from `first` up to, but without, `end`.

    `state` is the one just before step `first`. One thread writes; readers must hold its lock.
    """

    def __init__(self, state: SessionState, first: int) -> None:
        self.first = first
        self.end = first
        self._tracks: dict[int, Track] = {}
        self._open: dict[int, Track] = {}
        # Tracks by page (a stretch of steps) in which they may have cells, so that drawing a range
        # of steps need not look at all requests there ever were.
        self._pages: dict[int, dict[int, Track]] = {}
        self._last_page = first // _PAGE_STEPS
        for request_id, view in state.requests.items():
            if view.status != "finished":
                self._add(request_id, Track(view.client_id, first, _filler(view)))

    def extend(self, message: wire.Telemetry) -> None:
        if isinstance(message, wire.StepRecord):
            self._extend(message)
        elif isinstance(message, wire.EngineStatus):
            # An event between two steps is shown where it takes effect: an arrival in the next
            # step, an end in the step before.
            for event in message.events:
                self._take(event, max(self.end - 1, self.first), self.end)
        elif isinstance(message, wire.Snapshot):
            live = {v.request_id for v in message.requests if v.status != "finished"}
            for request_id in [each for each in self._open if each not in live]:
                track = self._open.pop(request_id)
                track.fill_to(self.end, track.filler)  # it was live as far as known

    def ids(self, first: int, last: int) -> list[int]:
        """Ids of the requests whose lanes show anything in the steps [first, last], in order.

        A screen has room for few lanes, so it fetches the cells of those few only.
        """
        begin, end = max(first, self.first), min(last + 1, self.end)
        opened = self._open
        found: set[int] = set()
        for page in range(begin // _PAGE_STEPS, last // _PAGE_STEPS + 1):
            for request_id, track in self._pages.get(page, {}).items():
                start = track.start
                # One that is open reaches to the end, written or not; no written cell is ABSENT.
                until = end if request_id in opened else min(last + 1, start + len(track.cells))
                if (begin if begin > start else start) < until:
                    found.add(request_id)
        return sorted(found)

    def names(self, request_ids: Iterable[int]) -> list[LaneName]:
        """Names of the requests; the client is "" if it is unknown."""
        tracks = self._tracks
        return [
            LaneName(each, tracks[each].client_id if each in tracks else "") for each in request_ids
        ]

    def cells(self, request_ids: Iterable[int], first: int, last: int) -> list[bytes]:
        """What each request did in the steps [first, last]: a `Cell` each, for `translate`."""
        width = last + 1 - first
        found = []
        for request_id in request_ids:
            track = self._tracks.get(request_id)
            if track is None:
                found.append(_ABSENT * width)
                continue
            if request_id in self._open:
                track.fill_to(min(last + 1, self.end), track.filler)
            start = max(track.start, self.first)
            cells = track.cells[max(first, start) - track.start : max(last + 1 - track.start, 0)]
            padding = _ABSENT * min(start - first, width)
            found.append(bytes((padding + cells).ljust(width, _ABSENT)))
        return found

    def forget_before(self, step: int) -> None:
        self.first = max(self.first, step)
        page = self.first // _PAGE_STEPS
        for old in [number for number in self._pages if number < page]:
            kept = self._pages.get(old + 1, {})
            for request_id, track in self._pages.pop(old).items():
                if request_id in kept or request_id in self._open:
                    track.forget_before((old + 1) * _PAGE_STEPS)
                elif self._tracks.get(request_id) is track:
                    del self._tracks[request_id]

    def forget_after(self, state: SessionState) -> None:
        step = state.step
        page = max(step, self.first) // _PAGE_STEPS
        touched = dict(self._open)
        for number in [each for each in self._pages if each >= page]:
            touched |= self._pages[number] if number == page else self._pages.pop(number)
        self.end = max(step + 1, self.first)
        self._last_page = page
        self._open.clear()
        for request_id, track in touched.items():
            view = state.requests.get(request_id)
            if view is None and track.start > step:
                del self._tracks[request_id]
                self._pages.get(page, {}).pop(request_id, None)
                continue
            del track.cells[max(0, step + 1 - track.start) :]
            if view is not None and view.status != "finished":
                self._open[request_id] = track
                track.filler = _filler(view)

    def _add(self, request_id: int, track: Track) -> None:
        self._tracks[request_id] = self._open[request_id] = track
        for page in range(track.start // _PAGE_STEPS, self._last_page + 1):
            self._pages.setdefault(page, {})[request_id] = track

    def _extend(self, record: wire.StepRecord) -> None:
        step = record.step
        if step > self.end:
            for track in self._open.values():
                track.fill_to(self.end, track.filler)
                track.fill_to(step, _UNKNOWN)
        self.end = step + 1
        while self._last_page < step // _PAGE_STEPS:  # live requests are on all pages up to it
            self._last_page += 1
            self._pages.setdefault(self._last_page, {}).update(self._open)
        ends = []
        for event in record.events:
            if isinstance(event, wire.Finished):
                ends.append(event)
            else:
                self._take(event, step, step)
        seated = self._open
        for row in record.batch or ():
            track = seated.get(row.request_id) or self._seat(row.request_id, step)
            cells = track.cells
            if len(cells) == step - track.start:  # as nearly always
                decodes = row.phase == _DECODE_PHASE and row.num_tokens == 1
                cells.append(_DECODE if decodes else _cell(row, step))
            else:
                track.put(step, _cell(row, step))
            track.filler = _IDLE  # only now, as unwritten steps before this one were waits
        for event in ends:
            self._take(event, step, step)

    def _seat(self, request_id: int, step: int) -> Track:
        """Return the track of a request that no event announced, or that seemed to have ended."""
        track = self._tracks.get(request_id) or Track("", step, _IDLE)
        self._add(request_id, track)
        return track

    def _take(self, event: wire.RequestEvent, step: int, arrival_step: int) -> None:
        if isinstance(event, wire.Arrived):
            if event.request_id not in self._tracks:
                self._add(event.request_id, Track(event.client_id, arrival_step, _WAITING))
            return
        track = self._open.get(event.request_id)
        if track is None:
            return
        if isinstance(event, wire.Preempted):
            track.put(step, Cell.PREEMPTED)
            track.filler = _WAITING
        elif isinstance(event, _ENDS):
            track.put(step, Cell.ABORTED if isinstance(event, wire.Aborted) else Cell.FINISHED)
            del self._open[event.request_id]


def _filler(view: wire.RequestView) -> bytes:
    return _IDLE if view.status == "running" else _WAITING


def _cell(row: wire.BatchRow, step: int) -> int:
    if row.phase == _DECODE_PHASE:
        return Cell.DECODE if row.num_tokens == 1 else Cell.DECODE_MULTI
    if row.num_hit_tokens >= row.num_tokens:
        return Cell.CACHED
    if row.phase == _RECOMPUTE_PHASE:
        return Cell.RECOMPUTE_ALT if step & 1 else Cell.RECOMPUTE
    return Cell.PREFILL_ALT if step & 1 else Cell.PREFILL
