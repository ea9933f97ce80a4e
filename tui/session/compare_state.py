"""`CompareState`: which two runs are compared, and which part of them the screen shows.

One object serves all screens of a dashboard. A `Comparer` reads the runs on a thread of its own. A
`CompareChooser` has the list of runs that a session can be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.recordings.compare.columns import ALIGNMENTS, Align, Axis, Place, axis_of
from stepscope.recordings.compare.comparison import Comparer
from stepscope.recordings.compare.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoint
from stepscope.recordings.compare.side_requests import Pair
from stepscope.recordings.history.source import Source
from stepscope.tui.settings.terminal import in_browser
from stepscope.tui.views.frame.compare_choices import (
    CompareChoice,
    ComparePage,
    LandmarkSearch,
    Origin,
    choices,
)
from stepscope.tui.views.frame.compare_text import SideName


@dataclass(slots=True)
class CompareChooser:
    """The rows of the list (None: closed) and the selected one; for the screen's thread."""

    choices: list[CompareChoice] | None = None
    selected: int = 0
    _source: Source | None = None
    _search: LandmarkSearch | None = None
    _num_recorded: int = -1  # landmarks of the recording among the choices; -1: not listed yet

    def open(self, source: Source) -> None:
        recording = getattr(source, "recording", None)
        if recording is not None and (self._search is None or self._search.path != recording.path):
            self._search = LandmarkSearch(recording.path)
        self._source = source
        self._num_recorded = -1
        self.selected = 0
        self.choices = []
        self.refresh()

    def close(self) -> None:
        self.choices = self._source = None

    def select(self, direction: int) -> None:
        self.selected = max(0, min(self.selected + direction, len(self.choices or ()) - 1))

    @property
    def chosen(self) -> CompareChoice | None:
        """The selected row; None if the list is empty or closed."""
        found = self.choices or []
        return found[min(self.selected, len(found) - 1)] if found else None

    @property
    def key(self) -> object:
        """A value that differs from the last one whenever the list must be drawn again."""
        is_searched = self._search is not None and self._search.found is not None
        return self.choices is not None, self.selected, is_searched

    def refresh(self) -> None:
        """Make the list again if the recording has more; the choice stays selected."""
        source, search = self._source, self._search
        found = () if search is None else search.found or ()
        if source is None or len(found) == self._num_recorded:
            return
        self._num_recorded = len(found)
        chosen = self.chosen if self.selected else None
        folders = [] if search is None else [search.path.absolute().parent]
        if not in_browser():  # the recordings of this folder are not for everybody who watches
            folders.insert(0, Path.cwd())
        self.choices = choices(source, folders, found)
        if chosen in self.choices:
            self.selected = self.choices.index(chosen)


EVENTS = KNOB | LATE | LOST | MARKED | PREEMPTED


@dataclass(slots=True)
class CompareState:
    """The compare page, for the screen's thread; `comparer`, `origins` only while comparing."""

    comparer: Comparer | None = None
    origins: tuple[Origin, Origin] | None = None
    align: Align = "time"
    focus: SideName = "a"
    selected: int = 0  # index in `pairs`
    chooser: CompareChooser = field(default_factory=CompareChooser)
    # Opens the main screen of a side at a step and a request. The dashboard sets it.
    open: Callable[[Origin, int | None, int | None], None] = lambda origin, step, request_id: None
    # Returns from the screens of a side to those of the dashboard's own session.
    go_home: Callable[[], None] = lambda: None
    _zoom: int = 0  # how often the shown part is halved; 0 shows the whole
    _cursor: int = 0
    _left: int = 0  # offset of the first column on the axis
    _num_columns: int = 1

    def begin(self, a: Origin, b: Origin) -> None:
        """Compare two runs; if one cannot be read, raise RecordingError, change nothing."""
        first = a.feed()
        try:
            second = b.feed()
        except BaseException:
            first.close()
            raise
        self.end()
        self.comparer = Comparer(first, second)
        self.origins = (a, b)
        self.chooser.close()
        self.selected = 0
        self._show_all()
        self.comparer.start()

    def end(self) -> None:
        """Stop the comparison and close both runs."""
        if self.comparer is not None:
            self.comparer.stop()
        self.comparer = self.origins = None

    def back(self) -> bool:
        """Close the list of choices or stop reading the runs; return false without."""
        if self.comparer is None:
            return False
        if self.chooser.choices is not None:
            self.chooser.close()
            return True
        is_reading = self.comparer.is_reading
        if is_reading:
            self.comparer.cancel()
        return is_reading

    def watch(self, is_watched: bool, source: Source) -> None:
        """If the page becomes visible without a comparison, open the list."""
        if is_watched and self.comparer is None and self.chooser.choices is None:
            self.chooser.open(source)

    @property
    def key(self) -> object:
        """A value that differs from the last one whenever the page must be drawn again."""
        comparer = self.comparer
        state = None
        if comparer is not None:
            shares = tuple(None if s is None else round(s, 2) for s in _shares(comparer))
            state = (id(comparer), comparer.version, shares, comparer.is_reading)
        choosing = self.chooser.key
        return state, self.align, self.focus, self.selected, choosing, self._zoom, self._cursor

    def next_align(self) -> None:
        self.align = ALIGNMENTS[(ALIGNMENTS.index(self.align) + 1) % len(ALIGNMENTS)]
        self._show_all()

    def other_side(self) -> None:
        self.focus = "b" if self.focus == "a" else "a"

    def select(self, direction: int) -> None:
        """Move the selection in the list of choices, or of the requests of both runs."""
        if self.chooser.choices is not None:
            self.chooser.select(direction)
            return
        self.selected = max(0, min(self.selected + direction, len(self.pairs) - 1))
        self._show_all()

    def select_row(self, row: int) -> None:
        """Select a choice of what to compare, or a request, by which both runs are then aligned."""
        if self.chooser.choices is not None:
            self.chooser.selected = 0
        else:
            self.align, self.selected = "request", 0
        self.select(row)

    def go_to_column(self, column: int) -> None:
        if (axis := self._axis()) is not None:
            self._go(axis, self._left + column * self._width(axis))

    def move(self, columns: int) -> None:
        if (axis := self._axis()) is not None:
            self._go(axis, self._cursor + columns * self._width(axis))

    def move_screen(self, direction: int) -> None:
        self.move(direction * max(1, self._num_columns - 1))

    def go_to_end(self, direction: int) -> None:
        if (axis := self._axis()) is not None:
            self._go(axis, axis.end if direction > 0 else axis.start)

    def zoom(self, direction: int) -> None:
        axis = self._axis()
        if axis is None:
            return
        whole = max(1, (axis.end - axis.start) // self._num_columns // axis.unit)
        self._zoom = max(0, min(self._zoom + direction, whole.bit_length()))
        self._left = self._cursor - self._num_columns // 2 * self._width(axis)

    def event(self, direction: int, flags: int = EVENTS) -> bool:
        """Go to the next event in either run, or before it; return false without one."""
        axis = self._axis()
        if axis is None or self.comparer is None or self.comparer.sides is None:
            return False
        found = []
        width = self._width(axis)
        for place, side in zip((axis.a, axis.b), self.comparer.sides, strict=True):
            with side.lock:
                edge = self._cursor + width - 1 if direction > 0 else self._cursor
                index = axis.index_at(place, edge)
                if direction < 0 and index >= 0 and axis.offset_of(place, index) < edge:
                    index += 1
                at = place.points.next_flagged(index, direction, flags)
                if at is not None:
                    found.append(axis.offset_of(place, at))
        inside = [offset for offset in found if axis.start <= offset < axis.end]
        if not inside:
            return False
        self._go(axis, min(inside) if direction > 0 else max(inside))
        return True

    def page(self, num_columns: int) -> ComparePage:
        self._num_columns = max(1, num_columns)
        self.chooser.refresh()
        comparer, axis = self.comparer, self._axis()
        found, notes, reading, cancelled = None, list[str](), False, False
        names, shares = ("", ""), _shares(comparer)
        if comparer is not None:
            names = (comparer.feeds[0].name, comparer.feeds[1].name)
            found, notes = comparer.comparison, comparer.notes
            reading, cancelled = comparer.is_reading, comparer.was_cancelled
        empty: list[StepPoint | None] = [None] * self._num_columns
        columns = empty, empty
        points: tuple[StepPoint | None, StepPoint | None] = (None, None)
        width, start, at = 1, 0, 0
        if axis is not None:
            width = self._width(axis)
            self._go(axis, self._cursor)
            start = self._left
            at = (self._cursor - start) // width
            columns = self._columns(0, axis, axis.a), self._columns(1, axis, axis.b)
            if 0 <= at < self._num_columns:
                points = columns[0][at], columns[1][at]
        pair = self._pair()
        choosing = self.chooser.choices is not None
        selected = self.chooser.selected if choosing else self.selected
        return ComparePage(
            names, found, self.chooser.choices, reading, cancelled, shares, notes,
            self.align if axis is None else axis.align, self.focus, columns, start, width,
            self._cursor, at, points, selected, pair,
        )  # fmt: skip

    @property
    def pairs(self) -> Sequence[Pair]:
        found = None if self.comparer is None else self.comparer.comparison
        return () if found is None else found.requests.pairs

    def _pair(self) -> Pair | None:
        pairs = self.pairs
        return pairs[min(self.selected, len(pairs) - 1)] if pairs else None

    def _axis(self) -> Axis | None:
        sides = None if self.comparer is None else self.comparer.sides
        if sides is None:
            return None
        with sides[0].lock, sides[1].lock:
            return axis_of(self.align, *sides, self._pair() if self.align == "request" else None)

    def _width(self, axis: Axis) -> int:
        """Return how much of the common axis one chart column covers, a multiple of `axis.unit`."""
        whole = -(-(axis.end - axis.start) // self._num_columns)
        units = -(-whole // axis.unit) >> self._zoom
        return max(1, units) * axis.unit

    def _go(self, axis: Axis, offset: int) -> None:
        width = self._width(axis)
        offset = max(axis.start, min(offset, axis.end - 1))
        self._cursor = axis.start + (offset - axis.start) // width * width
        shown = width * self._num_columns
        if shown >= axis.end - axis.start:
            self._left = axis.start
        elif not self._left <= self._cursor < self._left + shown:
            # Keep a third of the screen before the cursor, to show what led up to it.
            self._left = self._cursor - self._num_columns // 3 * width
        self._left = max(axis.start, min(self._left, axis.end - shown // 2))
        self._left = axis.start + (self._left - axis.start) // width * width

    def _columns(self, number: int, axis: Axis, place: Place) -> list[StepPoint | None]:
        assert self.comparer is not None
        assert self.comparer.sides is not None
        width = self._width(axis)
        starts = range(self._left, self._left + width * self._num_columns, width)
        with self.comparer.sides[number].lock:
            return [axis.column(place, start, start + width) for start in starts]

    def _show_all(self) -> None:
        self._zoom, self._cursor, self._left = 0, 0, 0


def _shares(comparer: Comparer | None) -> tuple[float | None, float | None]:
    return (None, None) if comparer is None else (comparer.feeds[0].share, comparer.feeds[1].share)
