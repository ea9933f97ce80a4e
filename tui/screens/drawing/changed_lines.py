"""`ChangedLines`: an update of the screen that is the lines that have changed, and nothing else.

Textual's way to the terminal goes from widget to screen in messages, and there finds out again what
is in front of what. The views of a canvas never overlap, and know which of their lines are new, so
that their strips can be written as they are: at ten frames a second that is a quarter of the cost.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from textual._compositor import CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget


class PlacedLine(NamedTuple):
    """A strip and where its first cell goes."""

    x: int
    y: int
    strip: Strip


class Views(Protocol):
    """Widgets that know which of their lines are new; `Canvas` says what both methods do."""

    def touch(self, shown: Mapping[Widget, tuple[Region, Region]]) -> bool: ...

    def changed(self, shown: Mapping[Widget, tuple[Region, Region]]) -> list[PlacedLine]: ...


class ChangedLines(CompositorUpdate):
    """What `App._display` takes."""

    def __init__(self, lines: Sequence[PlacedLine]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for x, y, strip in self._lines:
            yield Control.move_to(x, y).segment
            yield from strip

    def render_segments(self, console: Console) -> str:
        return "".join(
            [f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self._lines]
        )


def may_write(screen: Screen[None]) -> bool:
    """Whether nothing is in front of a screen, and it fills the terminal."""
    app = screen.app
    return app.screen is screen and not app.is_inline and not app._batch_count


def write_changed(screen: Screen[None], views: Views, everything: bool) -> None:
    """To the terminal, as one picture: what has changed, or all of it.

    All of it is written also where Textual is about to, as after something was in front.
    """
    shown = screen._compositor.visible_widgets
    if everything or screen._repaint_required or screen in screen._dirty_widgets:
        if not views.touch(shown):
            views.changed(shown)  # they are among all that Textual writes
            screen._repaint_required = True
            screen._on_timer_update()
            return
        screen._repaint_required = False
        screen._dirty_widgets.clear()
        screen._compositor._dirty_regions.clear()
    lines = views.changed(shown)
    if lines:
        screen.app._display(screen, ChangedLines(lines))
