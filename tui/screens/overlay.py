"""What opens above the main screen: one widget of lines, and every key for itself."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.geometry import Region
from textual.screen import ModalScreen

from stepscope.tui.theme import Skin
from stepscope.tui.widgets.lines import Line, Lines

_Result = TypeVar("_Result")


class Overlay(ModalScreen[_Result], Generic[_Result]):
    """A modal screen that shows `lines` at `place`; the screen below goes on drawing itself.

    Escape closes it without a result; every other key goes to `pressed`.
    """

    DEFAULT_CSS = "Overlay { background: transparent; }"

    def __init__(self, skin: Skin) -> None:
        super().__init__()
        self.skin = skin
        self._box = Lines(skin, id="overlay")

    def compose(self) -> ComposeResult:
        yield self._box

    def place(self, width: int, height: int) -> Region:
        """Where on a screen of this size."""
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Line]:
        """The content of the box, which has this size."""
        raise NotImplementedError

    def pressed(self, key: str, character: str | None) -> None:
        """A key other than Escape."""
        raise NotImplementedError

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
        if event.key == "escape":
            self.dismiss(None)
            return
        self.pressed(event.key, event.character if event.is_printable else None)
        if self.is_current:
            self.redraw()
