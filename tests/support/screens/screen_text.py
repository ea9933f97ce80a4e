"""The text on the screens of a dashboard, as the compositor composes it, and of lines."""

from collections.abc import Iterable
from typing import Any

from textual.app import App
from textual.screen import Screen

from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.lines import Line


def screen_text(app: App[Any]) -> str:
    """The text of the front screen."""
    return _text(app.screen)


def main_text(app: Dashboard) -> str:
    """The text of the main screen, whatever is in front of it."""
    return _text(app.main)


def line_texts(lines: Iterable[Line]) -> list[str]:
    """Of lines that a view has drawn."""
    return ["".join(run for run, _ in line) for line in lines]


def _text(screen: Screen[Any]) -> str:
    return "\n".join(strip.text for strip in screen._compositor.render_strips())
