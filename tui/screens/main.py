"""The main screen of one engine or recording: gives its actions keys and the mouse."""

from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from stepscope.tui.screens.handlers import Handlers
from stepscope.tui.screens.session_screen import SessionScreen
from stepscope.tui.screens.textual_parts import bindings
from stepscope.tui.session.session import Session
from stepscope.tui.settings.action_table import PAGES, Page
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import spot_of
from stepscope.tui.views.pages import compare_page
from stepscope.tui.views.panels import session_events
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import LATENCIES

# Panels of the main screen, and the page with more detail on each.
_DETAILS: Mapping[str, Page] = {
    "kv": "kv",
    "latency": "latency",
    "latency_line": "latency",
    "inspector": "step",
    "knobs": "knobs",
}


class MainScreen(SessionScreen, inherit_bindings=False):
    """The screen of one engine or recording, with its keys."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(PAGES)

    def __init__(self, session: Session, skin: Skin, fps: float | None) -> None:
        super().__init__(session, skin, fps)
        self.handlers = Handlers(self)
        self.by_action = self.handlers.by_action

    def on_click(self, event: events.Click) -> None:
        with self.shown_failures("the click"):
            self._click(event)
        self.draw_next()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button and self.canvas.at(event.x, event.y)[0] == "scrub":
            with self.shown_failures("the scrub bar"):
                self._scrub_to(event.x)
            self.draw_next()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._scroll(-1, event.shift)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._scroll(1, event.shift)

    def _scroll(self, direction: int, through_time: bool) -> None:
        """Handle the wheel: scroll lanes or rows, or move in time while shift is held."""
        if self.canvas.is_too_small:
            return
        with self.shown_failures("the wheel"):
            if through_time and self.view.page == "compare":
                self.session.compare.move(direction * 3)
            elif through_time:
                self.navigator.move(direction * 3)
            elif self.view.page != "live":
                self.action_do("lane_down" if direction > 0 else "lane_up")
            elif self.frame is not None:
                self.view.scroll_lanes(direction * 3, self.frame.num_lanes)
        self.draw()

    def _click(self, event: events.Click) -> None:
        """Handle a click on one of the views; a double click opens what was clicked."""
        name, x, y = self.canvas.at(event.x, event.y)
        is_double, frame = event.chain == 2, self.frame
        if frame is None:
            return
        if name in ("chart", "lanes"):
            if name == "lanes" and 0 < y <= len(frame.lanes):
                self.view.selected = frame.lanes[y - 1].request_id
            self.navigator.of_column(x - 1 - self.canvas.label_width)
            if is_double:
                self.action_do("inspect")
        elif name == "scrub":
            self._scrub_to(x)
        elif name != "page" or not self._click_charts(frame, x, y, is_double):
            self._click_spot(name, x, y, is_double)

    def _click_spot(self, name: str, x: int, y: int, is_double: bool) -> None:
        view = self.view
        kind, value = spot_of(self.canvas.content(name, y), x) or ("", "")
        if kind == "row":
            view.row = int(value)
            self.handlers.pages.select(0)
            if is_double:
                self.action_do("inspect")
        elif kind == "do":
            self.action_do(value)
        elif kind == "step":
            self.navigator.go(int(value))
        elif kind == "latency":
            view.latency = next(each for each in LATENCIES if each == value)
            self.handlers.pages.show("latency")
        elif kind == "knob" and is_double:
            self.handlers.pages.edit(value)
        elif is_double and name in _DETAILS:
            self.handlers.pages.show(_DETAILS[name])

    def _click_charts(self, frame: Frame, x: int, y: int, is_double: bool) -> bool:
        """Go to the clicked column of the compare charts; return false if none was clicked."""
        line = "".join(text for text, _ in self.canvas.content("page", y))
        column = compare_page.column_at(line, self.canvas.area.width, x)
        if frame.compare is None or column is None:
            return False
        self.session.compare.go_to_column(column)
        if is_double:
            self.action_do("inspect")
        return True

    def _scrub_to(self, x: int) -> None:
        frame = self.frame
        step = None if frame is None else session_events.step_at(frame, x, self.canvas.area.width)
        if step is not None:
            self.navigator.go(step)
