"""`StartScreen`: shows the start list in one widget, and passes keys and clicks on."""

from typing import ClassVar, Protocol

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from stepscope.tui.screens.key_bindings import bindings
from stepscope.tui.views.lines import Lines
from stepscope.tui.views.theme import Skin


class StartTarget(Protocol):
    """What gets the keys, clicks and resizes of the start screen; `StartApp` implements it."""

    def draw(self) -> None: ...

    def set_skin(self, skin: Skin) -> None: ...

    def do(self, action_id: str) -> None: ...

    def choose_digit(self, digit: int) -> None: ...

    def clicked(self, x: int, y: int) -> None: ...

    def move(self, direction: int) -> None: ...


class StartScreen(Screen[None], inherit_bindings=False):
    """The Textual screen that shows the start list.

    It passes its events to `start`, which must not block.
    """

    DEFAULT_CSS = "StartScreen { layout: vertical; overflow: hidden; }"
    BLANK = True
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(("start",)),
        *(Binding(str(each), f"digit({each})", show=False, priority=True) for each in range(1, 10)),
    ]

    def __init__(self, start: StartTarget, skin: Skin) -> None:
        super().__init__()
        self._start = start
        self.widget = Lines(skin, id="start")

    def compose(self) -> ComposeResult:
        yield self.widget

    def on_mount(self) -> None:
        self._start.set_skin(self.widget.skin)

    def on_resize(self, event: events.Resize) -> None:
        self.widget.styles.width = max(1, event.size.width)
        self.widget.styles.height = max(1, event.size.height)
        self._start.draw()

    def action_do(self, action_id: str) -> None:
        self._start.do(action_id)

    def action_digit(self, digit: int) -> None:
        self._start.choose_digit(digit)

    def on_click(self, event: events.Click) -> None:
        self._start.clicked(event.x, event.y)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._start.move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._start.move(1)
