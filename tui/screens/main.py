"""The main screen of one engine or recording: gives its actions keys and the mouse."""

from typing import ClassVar

from textual import events
from textual.binding import BindingType

from stepscope.tui.screens.drawing.session_screen import SessionScreen
from stepscope.tui.screens.handlers.handlers import Handlers
from stepscope.tui.screens.handlers.mouse import Mouse
from stepscope.tui.screens.key_bindings import bindings
from stepscope.tui.session.session import Session
from stepscope.tui.settings.page_names import PAGES
from stepscope.tui.views.theme import Skin


class MainScreen(SessionScreen, inherit_bindings=False):
    """The screen of one engine or recording, with its keys."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(PAGES)

    def __init__(self, session: Session, skin: Skin, fps: float | None) -> None:
        super().__init__(session, skin, fps)
        self.handlers = Handlers(self)
        self.by_action = self.handlers.by_action
        self._mouse = Mouse(self, self.handlers.pages)

    def on_click(self, event: events.Click) -> None:
        with self.failures.shown("the click"):
            self._mouse.click(event)
        self.draw_next()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button and self.canvas.at(event.x, event.y)[0] == "scrub":
            with self.failures.shown("the scrub bar"):
                self._mouse.scrub_to(event.x)
            self.draw_next()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._scroll(-1, event.shift)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._scroll(1, event.shift)

    def _scroll(self, direction: int, through_time: bool) -> None:
        if self.canvas.is_too_small:
            return
        with self.failures.shown("the wheel"):
            self._mouse.scroll(direction, through_time)
        self.draw()
