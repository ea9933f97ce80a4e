"""`Canvas`: the picture of the main screen, in one widget; `FrameMaker`: what it is drawn from.

A view is a function that draws one part of the screen, such as a chart, as lines of text. Views
share a widget because Textual then asks once what has changed and cuts no lines: at ten frames a
second a widget for each view would cost half as much again.
"""

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec

from textual.geometry import Region, Size

from stepscope.recordings.history.history import History
from stepscope.tui.session.navigator import replay_of
from stepscope.tui.session.session import Session
from stepscope.tui.session.tour import TourPage
from stepscope.tui.settings.action_table import Page
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views import format as fmt
from stepscope.tui.views import layout
from stepscope.tui.views.charts import budget_chart, kv_map, lanes
from stepscope.tui.views.frame.chart_columns import COLUMN_NS
from stepscope.tui.views.frame.fleet_view import placed
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.lines import Line, Lines
from stepscope.tui.views.pages import compare_page, fleet_page, knobs_page
from stepscope.tui.views.pages.page_views import PAGE_VIEWS, targets
from stepscope.tui.views.panels import footer, header, inspector, latency_panel, session_events
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import View

log = logging.getLogger("stepscope.tui")

_P = ParamSpec("_P")

_VIEWS: Mapping[str, Callable[[Frame, int, int, int], list[Line]]] = {
    "verdict": header.verdict,
    "figures": header.key_figures,
    "chart": budget_chart.draw,
    "lanes": lanes.draw,
    "kv": kv_map.draw,
    "latency": latency_panel.draw,
    "latency_line": latency_panel.one_line,
    "inspector": inspector.draw,
    "events": session_events.draw,
    "scrub": session_events.scrub_bar,
}
_FAST = frozenset({"verdict", "figures", "chart", "lanes", "inspector"})  # drawn in each frame
_GROWING: frozenset[Page] = frozenset({"latency", "knobs", "request"})  # lists that grow at the top


class Canvas(Lines):
    """Draws frames, one view beside the other; a notice replaces a view that fails."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; }"

    def __init__(self, session: Session, skin: Skin) -> None:
        super().__init__(skin, id="canvas")
        self.places: dict[str, Region] = {}
        self.page: Page = "live"  # the page that `places` is for
        self.area = Size(0, 0)  # of the screen
        self._drawn: dict[str, list[Line]] = {}  # the lines of each view
        self._is_changed = True  # since the last `write`
        self._session = session
        self._broken: dict[str, str] = {}  # views that failed when they were drawn last
        self._logged: set[str] = set()
        self._marked: str | None = None

    @property
    def is_too_small(self) -> bool:
        return "too_small" in self.places

    @property
    def failure(self) -> str | None:
        """Why a view could not be drawn, in one line."""
        return next(iter(self._broken.values()), None)

    def place(self, size: Size, page: Page) -> None:
        self.page = page
        strip = 0 if self._session.tour is None else footer.TOUR_HEIGHT
        self.places = layout.plan(size.width, size.height, page, strip)
        self._broken.clear()
        self.area, self._is_changed = size, True

    def height_of(self, name: str) -> int:
        """Return the number of rows of a view inside its frame; 0 if it is not shown."""
        place = self.places.get(name)
        return 0 if place is None else max(0, place.height - 2)

    @property
    def label_width(self) -> int:
        """Number of cells left of the first column, in the chart and in the lanes."""
        return 20 if self.area.width >= layout.WIDE_WIDTH else 16

    @property
    def num_columns(self) -> int:
        place = self.places.get("chart") or self.places.get("lanes")
        return 0 if place is None else max(0, place.width - 2 - self.label_width)

    def draw(
        self,
        frame: Frame,
        connection: header.SourceState,
        pending: str,
        following: bool,
        everything: bool,
    ) -> None:
        """Draw a frame; `everything`: also the slow views, which need not change all the time."""
        width = self.area.width
        if self.is_too_small:
            return
        if self._session.tour is not None:
            self._show("tour", self._tour_lines, self._session.tour.page)
        page = self.places.get("page")
        if page is not None and everything:
            self._show("page", PAGE_VIEWS[self.page].draw, frame, page.width, page.height)
        gutter = self.label_width
        for name, draw in _VIEWS.items():
            place, is_fast = self.places.get(name), name in _FAST and page is None
            if place is not None and (everything or is_fast):
                self._show(name, draw, frame, place.width, place.height, gutter)
        headers = {"fleet": fleet_page.header, "compare": compare_page.header}
        draw_header = headers.get(self.page, header.draw)
        self._show("header", draw_header, frame, connection, width)
        if not everything:
            return
        abilities = self._session.abilities
        if (place := self.places.get("knobs")) is not None:
            editable = abilities.allows(abilities.action("knobs"))
            size = place.width, place.height
            self._show("knobs", knobs_page.panel, frame, *size, pending, editable)
        self._show("footer", footer.draw, abilities, following, width, self.page)

    def _show(
        self, name: str, draw: Callable[_P, list[Line]], *args: _P.args, **kw: _P.kwargs
    ) -> None:
        """Call `draw` and keep its lines for the view `name`; if it fails, show the error."""
        try:
            lines = draw(*args, **kw)
        except Exception as error:  # any error: the next frame tries again
            text = f"drawing failed, {see_log(error)} ({name})"
            if text not in self._logged:  # it may happen ten times a second
                self._logged.add(text)
                log.exception("drawing failed: %s", name)
            self._broken[name] = text
            lines = [((" ? this could not be drawn", "caution"),)]
        else:
            self._broken.pop(name, None)
        if name == self._marked:  # the panel that the tour points at
            styles = {"frame": "mark"}
            lines = [tuple((text, styles.get(style, style)) for text, style in x) for x in lines]
        self._keep(name, lines)

    def _tour_lines(self, page: TourPage) -> list[Line]:
        self._marked = next((name for name in page.panels if name in self.places), None)
        key = {each.id: each.key for each in self._session.abilities.actions}
        number = "" if page.number > page.total else f" {page.number}/{page.total}"
        title, text = f"tour{number}  {page.title}", page.text.format_map(key)
        width, is_held = self.area.width, page.is_held
        keys = ((key["tour_next"], "next"), (key["tour_again"], "again"), (key["quit"], "leave"))
        return footer.tour_strip(title, page.part, text, keys, width, is_held=is_held)

    def notice(self, line: Line) -> None:
        """Show the notice line on a screen of any size; without a notice, the screens' names."""
        if self.is_too_small:
            self._keep("too_small", [((_wanted(self.area), "caution"),), line])
        else:
            self._keep("notice", [line or footer.tabs(self._session.abilities, self.page)])

    def _keep(self, name: str, lines: list[Line]) -> None:
        if lines != self._drawn.get(name):
            self._drawn[name], self._is_changed = lines, True

    def write(self) -> None:
        if not self._is_changed:
            return
        self._is_changed = False
        rows: list[list[tuple[Line, int | None]]] = [[] for _ in range(self.area.height)]
        for name, place in sorted(self.places.items(), key=lambda each: each[1].x):
            lines = self._drawn.get(name, ())
            for y, row in enumerate(rows[place.y : place.bottom]):
                row.append((lines[y] if y < len(lines) else (), place.width))
        self.show_rows([tuple(row) for row in rows])

    def at(self, x: int, y: int) -> tuple[str, int, int]:
        for name, place in self.places.items():
            if place.contains(x, y):
                return name, x - place.x, y - place.y
        return "", x, y

    def content(self, name: str, y: int) -> Line:
        """Return line `y` of a view as it was drawn; an empty line if there is none."""
        lines = self._drawn.get(name, [])
        return lines[y] if 0 <= y < len(lines) else ()

    def text_of(self, *names: str) -> list[str]:
        shown = self.plain_text()
        return [
            line[place.x : place.right]
            for place in (self.places[name] for name in names)
            for line in shown[place.y : place.bottom]
        ]


def _wanted(size: Size) -> str:
    has = f"{size.width}x{size.height}"
    texts = (f"stepscope needs 80x20, has {has}", f"needs 80x20, has {has}", "needs 80x20", "80x20")
    return fmt.first_fitting((*texts, "!"), size.width)


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
        extent, clock = None if self._replay is None else self._replay.extent, session.clock
        in_file = None if self._replay is None else self._replay.file_index
        self._builder = FrameBuilder(self.history, extent, clock, keys, in_file, self._stands)

    def _stands(self) -> bool:
        return self._replay is not None and self._replay.status != "playing"

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
            elif canvas.num_columns and self._replay.extent is not None:
                (first, last), (start_ns, end_ns) = self._replay.extent, self._replay.extent_ns
                num_cells = (end_ns - start_ns) / COLUMN_NS
                view.fit_time(num_cells, num_cells / (last + 1 - first), canvas.num_columns)
            self._replay.look_at(view.cursor)
        frame = self._builder.build(view, canvas.num_columns, num_lanes, num_events)
        frame.status = session.source.status
        if view.page == "fleet":
            fleet_view = session.fleet_view
            recorded = frozenset(fleet_view.name_of(each) for each in session.switches.active)
            frame.fleet = fleet_view.page(fleet_view.name_of(session.source), recorded)
            shown = placed(frame.fleet, canvas.area.width - 2)
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
