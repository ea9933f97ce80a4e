"""Handlers of the actions on the start screen."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from textual.app import App

from stepscope.tui.settings.actions import Abilities
from stepscope.tui.settings.log_file import log_path
from stepscope.tui.views.pages.start_list import StartChoice
from stepscope.tui.views.theme import Skin

_SCREEN = 8  # lines
_ALL = 1_000_000


class StartList(Protocol):
    """What handlers may use of the start screen."""

    skin: Skin
    abilities: Abilities

    def set_skin(self, skin: Skin) -> None: ...

    def move(self, direction: int) -> None: ...

    def choose(self, choice: StartChoice) -> None: ...

    def choose_selected(self) -> None: ...

    def do(self, action_id: str) -> None: ...


def handlers(start: StartList, app: App[StartChoice]) -> Mapping[str, Callable[[], object]]:
    """Return action id -> handler, for every action that works on the start screen."""
    return {
        "lane_up": partial(start.move, -1),
        "lane_down": partial(start.move, 1),
        "screen_back": partial(start.move, -_SCREEN),
        "screen_forward": partial(start.move, _SCREEN),
        "oldest": partial(start.move, -_ALL),
        "live": partial(start.move, _ALL),
        "inspect": start.choose_selected,
        "endpoint": partial(start.choose, StartChoice("ask")),
        "theme": partial(_theme, start),
        "glyphs": partial(_glyphs, start),
        "redraw": partial(_redraw, app),
        "help": partial(_help, start, app),
        "palette": partial(_palette, start, app),
        "suspend": app.action_suspend_process,
        "quit": partial(app.exit, None),
    }


def _theme(start: StartList) -> None:
    if start.skin.mode in ("dark", "light"):
        start.set_skin(
            Skin("light" if start.skin.mode == "dark" else "dark", start.skin.ascii_only)
        )


def _glyphs(start: StartList) -> None:
    start.set_skin(Skin(start.skin.mode, not start.skin.ascii_only))


def _redraw(app: App[StartChoice]) -> None:
    app.screen.refresh(layout=True)


def _help(start: StartList, app: App[StartChoice]) -> None:
    from stepscope.tui.screens.overlays.help import (
        HelpPage,  # imports all pages, which the start list does not need
    )

    app.push_screen(HelpPage(start.skin, start.abilities, "start", log_path()))


def _palette(start: StartList, app: App[StartChoice]) -> None:
    from stepscope.tui.screens.overlays.palette import Palette

    def run(action_id: str | None) -> None:
        if action_id is not None:
            start.do(action_id)

    offered = [action for action in start.abilities.on("start") if action.id != "palette"]
    app.push_screen(Palette(start.skin, offered), run)
