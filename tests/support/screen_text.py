"""The text on the screens of a dashboard, as the compositor composes it."""

from typing import Any

from textual.app import App
from textual.screen import Screen

from stepscope.tui.app.app import Dashboard


def screen_text(app: App[Any]) -> str:
    """The text of the front screen."""
    return _text(app.screen)


def main_text(app: Dashboard) -> str:
    """The text of the main screen, whatever is in front of it."""
    return _text(app.main)


def _text(screen: Screen[Any]) -> str:
    return "\n".join(strip.text for strip in screen._compositor.render_strips())
