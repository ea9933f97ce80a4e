"""The text on the screens of a dashboard, as the compositor composes it, and of lines."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from rich.style import Style
from textual.app import App
from textual.screen import Screen

from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.help import help_blocks
from stepscope.tui.settings.action_table import Place
from stepscope.tui.settings.actions import Abilities
from stepscope.tui.views.lines import Line

# One row of a screen: its runs of characters, each with its style.
Cells: TypeAlias = list[tuple[str, Style]]


def screen_text(app: App[Any]) -> str:
    """The text of the front screen."""
    return _text(app.screen)


def main_text(app: Dashboard) -> str:
    """The text of the main screen, whatever is in front of it."""
    return _text(app.main)


def cells(app: App[Any]) -> list[Cells]:
    """The rows of cells that an application shows, overlays included."""
    rows = app.screen._compositor.render_update(
        full=True, screen_stack=app._background_screens, simplify=True
    )
    return [
        [(segment.text, segment.style or Style()) for strip in row for segment in strip]
        for row in rows.strips
    ]


def line_texts(lines: Iterable[Line]) -> list[str]:
    """Of lines that a view has drawn."""
    return ["".join(run for run, _ in line) for line in lines]


def help_lines(abilities: Abilities, page: Place = "live") -> list[Line]:
    """All lines of the help page, in one column."""
    return [line for block in help_blocks(abilities, page) for line in block]


def _text(screen: Screen[Any]) -> str:
    return "\n".join(strip.text for strip in screen._compositor.render_strips())
