"""`Frame`: everything one picture is drawn from, taken from the history at one moment.

The views are pure functions of a frame, so that a test can make one and read the lines.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from stepscope.engine.wire import RequestView, StepRecord
from stepscope.recordings.columns import Rates, StepSummary
from stepscope.recordings.events import SessionEvent
from stepscope.recordings.history import History
from stepscope.recordings.lanes import Lane
from stepscope.recordings.latency import LatencyReport
from stepscope.recordings.session import SessionState, request_name
from stepscope.recordings.stalls import Stall
from stepscope.tui.chart_columns import ChartColumn, ChartColumns
from stepscope.tui.view import View

LATENCY_WINDOW_S = 60.0
_REFRESH_S = 0.5  # of what is too dear, or too restless to read, ten times a second
NOTABLE = frozenset({"preempt", "abort", "reject", "knobs", "slo", "gap", "mark", "engine"})


class LaneRow(NamedTuple):
    """One request over the visible columns; `cells` has one `Cell` a column."""

    request_id: int
    name: str
    client_id: str
    status: str  # WAIT, PRE, DEC, OUT, END, ABRT
    context: int | None  # tokens whose K/V is in the cache
    cells: bytes


@dataclass(slots=True)
class Frame:
    """What the screen shows. `summary`, `state` and the latencies are those at the cursor."""

    history: History
    view: View
    state: SessionState
    first_step: int | None
    last_step: int | None
    cursor: int | None  # step looked at; the newest while live
    summary: StepSummary | None
    columns: list[ChartColumn | None]
    cursor_column: int | None  # None while live: the newest is where it always is
    lanes: list[LaneRow]
    num_lanes: int  # that could be shown
    latency: LatencyReport
    rates: Rates
    stall: Stall | None
    waiting_trend: int  # +1 more wait than a moment ago, -1 fewer
    events: list[SessionEvent] = field(default_factory=list)
    landmarks: list[SessionEvent] = field(default_factory=list)  # for the scrub bar

    @property
    def record(self) -> StepRecord | None:
        """The whole record of the step at the cursor."""
        return None if self.cursor is None else self.history.record(self.cursor)

    def wall_ns(self, step: int | None) -> int | None:
        summary = None if step is None else self.history.summary(step)
        return None if summary is None else self.history.wall_ns(summary.tokens_ns)


class FrameBuilder:
    """Makes frames; keeps what is dear between them. Belongs to the UI thread.

    Args:
        clock: seconds, for pacing only.
    """

    def __init__(self, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self._columns = ChartColumns(history)
        self._figures: tuple[object, LatencyReport, Rates, Stall | None, int] | None = None
        self._landmarks: tuple[object, list[SessionEvent]] | None = None

    def build(self, view: View, num_columns: int, num_lanes: int, num_events: int) -> Frame:
        """The picture as of now, for a chart of so many columns and lanes."""
        history = self._history
        first_step, last_step = history.first_step, history.last_step
        if view.cursor is not None and first_step is not None and last_step is not None:
            # Old steps are forgotten while somebody looks at them.
            view.cursor = max(first_step, min(last_step, view.cursor))
        cursor = last_step if view.cursor is None else view.cursor
        state = history.state if view.cursor is None else history.state_at(view.cursor)
        columns = self._columns.visible(view, num_columns)
        cursor_column = _column_of(columns, view.cursor)
        if view.cursor is not None and cursor_column is None and last_step is not None:
            shown = [column for column in columns if column is not None]
            if shown:
                view.keep_visible(shown[0].first, shown[-1].last, last_step)
                columns = self._columns.visible(view, num_columns)
                cursor_column = _column_of(columns, view.cursor)
        lanes, total = self._lanes(view, columns, state, num_lanes)
        latency, rates, stall, trend = self._paced(view, cursor, state)
        return Frame(
            history=history,
            view=view,
            state=state,
            first_step=first_step,
            last_step=last_step,
            cursor=cursor,
            summary=None if cursor is None else history.summary(cursor),
            columns=columns,
            cursor_column=cursor_column,
            lanes=lanes,
            num_lanes=total,
            latency=latency,
            rates=rates,
            stall=stall,
            waiting_trend=trend,
            events=self._events(view, num_events),
            landmarks=self._scrub_marks(),
        )

    # Lanes

    def _lanes(
        self,
        view: View,
        columns: list[ChartColumn | None],
        state: SessionState,
        num_lanes: int,
    ) -> tuple[list[LaneRow], int]:
        shown = [column for column in columns if column is not None]
        if not shown or num_lanes <= 0:
            return [], 0
        first = shown[0].first
        lanes = self._history.lanes(first, shown[-1].last)
        if view.filter:
            wanted = lane_filter(view.filter)
            lanes = [lane for lane in lanes if wanted(lane, state.requests.get(lane.request_id))]
        chosen = _choose(lanes, view, state, num_lanes)
        rows = [
            _lane_row(lane, state.requests.get(lane.request_id), _cells(lane.cells, columns, first))
            for lane in chosen
        ]
        return rows, len(lanes)

    # Figures that are read, not watched

    def _paced(
        self, view: View, cursor: int | None, state: SessionState
    ) -> tuple[LatencyReport, Rates, Stall | None, int]:
        history = self._history
        when: object = (
            view.cursor if view.cursor is not None else round(self._clock() / _REFRESH_S),
            None if history.info is None else history.info.engine_id,
        )
        if self._figures is None or self._figures[0] != when:
            end_ns = None if view.cursor is None else state.time_ns
            latency = history.latency(end_ns, LATENCY_WINDOW_S)
            rates = history.rates(end_ns)
            stall = history.last_stall(cursor)
            trend = self._waiting_trend(cursor, state)
            self._figures = (when, latency, rates, stall, trend)
        return self._figures[1:]

    def _waiting_trend(self, cursor: int | None, state: SessionState) -> int:
        before = self._history.step_at(state.time_ns - 2_000_000_000)
        summary = None if before is None or cursor is None else self._history.summary(before)
        if summary is None:
            return 0
        return (state.num_waiting > summary.num_waiting) - (state.num_waiting < summary.num_waiting)

    # Events

    def _events(self, view: View, num_events: int) -> list[SessionEvent]:
        """The last ones up to the cursor; the many finished requests never crowd out the rest."""
        if num_events <= 0:
            return []
        notable = self._history.events(view.cursor, num_events - num_events // 4, NOTABLE)
        finished = self._history.events(
            view.cursor, num_events - len(notable), frozenset({"finish"})
        )
        return sorted([*notable, *finished], key=lambda event: event.step)

    def _scrub_marks(self) -> list[SessionEvent]:
        when: object = round(self._clock()), len(self._history.marks)
        if self._landmarks is None or self._landmarks[0] != when:
            kinds = frozenset({"preempt", "knobs", "mark", "gap"})
            self._landmarks = (when, self._history.events(None, 500, kinds))
        return self._landmarks[1]


def _column_of(columns: list[ChartColumn | None], step: int | None) -> int | None:
    """The last column that shows `step`."""
    if step is None:
        return None
    for x in range(len(columns) - 1, -1, -1):
        column = columns[x]
        if column is not None and column.first <= step <= column.last:
            return x
    return None


def _cells(cells: bytes, columns: list[ChartColumn | None], first: int) -> bytes:
    """One cell a column: the largest of its steps, which is the one to show."""
    if all(column is None or column.first == column.last for column in columns):
        return bytes(0 if column is None else cells[column.first - first] for column in columns)
    return bytes(
        0 if column is None else max(cells[column.first - first : column.last + 1 - first])
        for column in columns
    )


_RANK = {"OUT": 0, "PRE": 1, "DEC": 2, "WAIT": 3, "END": 4, "ABRT": 4, "": 5}


def _choose(lanes: list[Lane], view: View, state: SessionState, num_lanes: int) -> list[Lane]:
    """The lanes that get a row, in the order of `view.sort`."""
    requests = state.requests

    def status(lane: Lane) -> str:
        return lane_status(requests.get(lane.request_id))

    if view.sort == "state":
        lanes = sorted(lanes, key=lambda lane: (_RANK[status(lane)], lane.request_id))
    elif view.sort == "latest":
        lanes = lanes[::-1]
    elif view.sort == "blocks":
        lanes = sorted(
            lanes,
            key=lambda lane: -view_blocks(requests.get(lane.request_id)),
        )
    else:
        lanes = sorted(lanes, key=lambda lane: status(lane) == "WAIT")
    if view.first_lane is not None:
        view.first_lane = max(0, min(view.first_lane, len(lanes) - num_lanes))
        return lanes[view.first_lane : view.first_lane + num_lanes]
    surplus = len(lanes) - num_lanes
    if surplus <= 0 or view.sort != "arrival":
        return lanes[:num_lanes]
    # Too many: first the ones that have ended go, then the end of the queue, then the oldest.
    kept = []
    for lane in lanes:
        if surplus > 0 and status(lane) in ("END", "ABRT", ""):
            surplus -= 1
        else:
            kept.append(lane)
    num_waiting = sum(status(lane) == "WAIT" for lane in kept)
    cut = min(surplus, max(0, num_waiting - max(2, num_lanes // 5)))
    kept = kept[: len(kept) - cut]
    return kept[max(0, surplus - cut) :]


def view_blocks(view: RequestView | None) -> int:
    return 0 if view is None else view.num_blocks


def _lane_row(lane: Lane, view: RequestView | None, cells: bytes) -> LaneRow:
    return LaneRow(
        lane.request_id,
        request_name(lane.request_id),
        lane.client_id,
        lane_status(view),
        None if view is None else (view.num_computed_tokens or view.num_prompt_tokens),
        cells,
    )


def lane_status(view: RequestView | None) -> str:
    """What a request does at the cursor, in at most four letters."""
    if view is None:
        return ""
    if view.status == "waiting":
        return "WAIT"
    if view.status == "preempted":
        return "OUT"
    if view.status == "finished":
        return "ABRT" if view.finish_reason == "abort" else "END"
    return "PRE" if view.num_computed_tokens < view.num_prompt_tokens else "DEC"


class FilterError(ValueError):
    """A filter that cannot be understood; the message says why."""


def lane_filter(text: str) -> Callable[[Lane, RequestView | None], bool]:
    """What `text` lets through: `state:dec`, `id:12`, `!regex` or plain text in the names.

    Several words must all hold.

    Raises:
        FilterError: a broken regular expression, or a word with an unknown beginning.
    """
    tests = [_filter_word(word) for word in text.split()]
    return lambda lane, view: all(test(lane, view) for test in tests)


def _filter_word(word: str) -> Callable[[Lane, RequestView | None], bool]:
    if word.startswith("!"):
        try:
            pattern = re.compile(word[1:])
        except re.error as error:
            raise FilterError(f"{word!r} is no regular expression: {error}") from error
        return lambda lane, view: pattern.search(_names(lane)) is not None
    key, separator, value = word.partition(":")
    if separator and key == "state":
        return lambda lane, view: lane_status(view).lower().startswith(value.lower())
    if separator and key == "id":
        number = value.removeprefix("r")
        return lambda lane, view: str(lane.request_id) == number
    return lambda lane, view: word.lower() in _names(lane).lower()


def _names(lane: Lane) -> str:
    return f"{request_name(lane.request_id)} {lane.client_id}"
