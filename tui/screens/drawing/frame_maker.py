"""`FrameMaker`: makes the frames that a screen draws, from the steps of one history.

On the fleet and compare pages it adds the data of other engines and of the comparison. A history is
a session's steps in memory.
"""

from typing import TYPE_CHECKING

from stepscope.recordings.history.history import History
from stepscope.tui.screens.drawing.canvas import Canvas
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import replay_of
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.charts import fleet_columns
from stepscope.tui.views.frame.chart_columns import COLUMN_NS
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import compare_page
from stepscope.tui.views.pages.page_views import targets
from stepscope.tui.views.view import View

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

_GROWING: frozenset[Page] = frozenset({"latency", "knobs", "request"})  # lists that grow at the top


class FrameMaker:
    """Makes frames for a canvas. `history` is the history on the screen."""

    def __init__(self, session: Session, view: View, canvas: Canvas) -> None:
        self.history = session.history
        self._session = session
        self._view = view
        self._canvas = canvas
        self._replay = replay_of(session.source)
        self.forget()

    def look_at(self, history: History) -> None:
        """Make frames of another history from now on, such as the one before a restart."""
        self.history = history
        self.forget()

    def forget(self) -> None:
        """Drop all cached figures, because the keys, service levels or history have changed."""
        session = self._session
        keys = {action.id: action.key for action in session.abilities.actions}
        extent = None if self._replay is None else self._replay.extent
        in_file = None if self._replay is None else self._replay.file_index
        self._builder = FrameBuilder(
            self.history, extent, session.clock, keys, in_file, self._stands
        )

    def _stands(self) -> bool:
        return self._replay is not None and self._replay.status != "playing"

    def _fit_time(self, replay: "ReplaySource") -> None:
        if replay.extent is None:
            return
        (first, last), (start_ns, end_ns) = replay.extent, replay.extent_ns
        num_cells = (end_ns - start_ns) / COLUMN_NS
        self._view.fit_time(num_cells, num_cells / (last + 1 - first), self._canvas.num_columns)

    @property
    def is_behind(self) -> bool:
        """Whether a new frame would show newer figures or events, even if no new step has come."""
        return self._builder.is_behind

    def frame(self) -> Frame:
        session, view, canvas = self._session, self._view, self._canvas
        num_events = max(8, canvas.height_of("events")) if "events" in canvas.places else 0
        num_lanes = canvas.height_of("lanes")
        if self._replay is not None:
            if view.axis == "step" and canvas.num_columns:
                self._replay.show(canvas.num_columns * view.zoom)
            elif canvas.num_columns:
                self._fit_time(self._replay)
            self._replay.look_at(view.cursor)
        frame = self._builder.build(view, canvas.num_columns, num_lanes, num_events)
        frame.status = session.source.status
        if view.page == "fleet":
            fleet_view = session.fleet_view
            recorded = frozenset(fleet_view.name_of(each) for each in session.switches.active)
            frame.fleet = fleet_view.page(fleet_view.name_of(session.source), recorded)
            shown = fleet_columns.placed(frame.fleet, canvas.area.width - 2)
            fleet_view.shown = tuple(column.key for column in shown)
        session.compare.watch(view.page == "compare", session.source)
        if view.page == "compare":
            frame.compare = session.compare.page(compare_page.chart_columns(canvas.area.width))
        if view.page != "live":
            _keep_row(view, frame)
        return frame


def _keep_row(view: View, frame: Frame) -> None:
    """Keep the selected row on the same request, or the same list entry, while the list changes."""
    rows = targets(frame)
    if frame.fleet is not None:
        view.row = frame.fleet.selected or 0
    if frame.compare is not None:
        view.row = frame.compare.selected
    if view.page == "step" and view.selected is not None:
        mine = (n for n, target in enumerate(rows) if target.request_id == view.selected)
        view.row = next(mine, view.row)
    is_elsewhere = rows[view.row : view.row + 1] != [view.entry]
    if view.page in _GROWING and view.entry is not None and is_elsewhere:
        at = next((n for n, target in enumerate(rows) if target == view.entry), None)
        view.row = at or 0
        if at is None:
            view.entry = None  # it has left the list: select the newest until the next choice
    view.row = max(0, min(view.row, len(rows) - 1))
