"""`Overlay`: base class of dialogs above a screen. It has one widget, a box, and gets all keys."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.geometry import Region
from textual.screen import ModalScreen

from stepscope.tui.settings.key_names import spelled
from stepscope.tui.views.lines import Line, Lines
from stepscope.tui.views.theme import Skin

log = logging.getLogger("stepscope.tui")

_Result = TypeVar("_Result")


def pasted_line(text: str) -> str:
    """Return the first line of a pasted text that is not blank, without control characters."""
    line = next((each for each in text.splitlines() if each.strip()), "")
    return "".join(filter(str.isprintable, line))


class Overlay(ModalScreen[_Result], Generic[_Result]):
    """A modal screen that shows `lines` in a box at `place`; Escape closes it without a result."""

    DEFAULT_CSS = "Overlay { background: transparent; }"

    def __init__(self, skin: Skin) -> None:
        super().__init__()
        self.skin = skin
        self._box = Lines(skin, id="overlay")

    def compose(self) -> ComposeResult:
        yield self._box

    def place(self, width: int, height: int) -> Region:
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Line]:
        raise NotImplementedError

    def pressed(self, key: str, character: str | None) -> None:
        raise NotImplementedError

    def insert(self, text: str) -> None:
        """Append typed or pasted text to the text field. An overlay without one ignores it."""

    def clicked(self, x: int, y: int) -> None:
        """Handle a click on this cell of the box. (A click beside the box closes the overlay.)"""

    def hint(self, text: str) -> str:
        """Return `text` with the arrow keys written in glyphs that this terminal can show."""
        return spelled(text) if self.skin.ascii_only else text

    def redraw(self) -> None:
        region = self.place(*self.size)
        styles = self._box.styles
        styles.offset = (region.x, region.y)
        styles.width = max(1, region.width)
        styles.height = max(1, region.height)
        self._box.show(self.lines(region.width, region.height))

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.redraw()

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if not self.is_current:  # typed in one burst with the key that closed it
            self.app.post_message(events.Key(event.key, event.character))
            return
        if event.key == "escape":
            self.dismiss(None)
            return
        with self._failures_logged():
            self.pressed(event.key, event.character if event.is_printable else None)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if not self.is_current:
            self.app.post_message(events.Paste(event.text))
            return
        with self._failures_logged():
            self.insert(pasted_line(event.text))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if not self.is_current:  # the click was meant for this overlay, which has just closed
            return
        if event.widget is not self._box:
            self.dismiss(None)
            return
        with self._failures_logged():
            self.clicked(event.x, event.y)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._scroll(event, "up")

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._scroll(event, "down")

    def _scroll(self, event: events.MouseEvent, key: str) -> None:
        event.stop()
        if self.is_current:
            with self._failures_logged():
                self.pressed(key, None)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """A context for keys and clicks: redraws the box, or logs an error and closes."""
        try:
            yield
            if self.is_current:
                self.redraw()
        except Exception:
            log.exception("%s failed", type(self).__name__)
            self.dismiss(None)
