"""`ChangedLines`: a screen update that writes only the lines that have changed.

Textual sends each change from the widget to the screen as a message, and then computes anew which
widget covers which. The views of a canvas never overlap and know which of their lines are new, so
their strips (finished lines) can be written directly. At ten frames a second this costs a quarter
as much.
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
    """A finished line for the terminal, and the position of its first cell."""

    x: int
    y: int
    strip: Strip


class Views(Protocol):
    """Widgets that know which of their lines are new; `Canvas` documents both methods."""

    def touch(self, shown: Mapping[Widget, tuple[Region, Region]]) -> bool: ...

    def changed(self, shown: Mapping[Widget, tuple[Region, Region]]) -> list[PlacedLine]: ...


class ChangedLines(CompositorUpdate):
    """The changed lines as an update that `App._display` accepts."""

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
    """Whether this screen may write to the terminal: it fills all of it and nothing covers it."""
    app = screen.app
    return app.screen is screen and not app.is_inline and not app._batch_count


def write_changed(screen: Screen[None], views: Views, everything: bool) -> None:
    """Write the changed lines to the terminal as one update; with `everything`, write all lines.

    It writes all lines also if Textual was about to do so, such as after an overlay has closed.
    """
    shown = screen._compositor.visible_widgets
    if everything or screen._repaint_required or screen in screen._dirty_widgets:
        if not views.touch(shown):
            views.changed(shown)  # drop them: Textual writes all lines
            screen._repaint_required = True
            screen._on_timer_update()
            return
        screen._repaint_required = False
        screen._dirty_widgets.clear()
        screen._compositor._dirty_regions.clear()
    lines = views.changed(shown)
    if lines:
        screen.app._display(screen, ChangedLines(lines))
