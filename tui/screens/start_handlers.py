"""What the actions of the table do on the start screen."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from stepscope.tui.log_file import log_path
from stepscope.tui.start_list import Choice
from stepscope.tui.theme import Skin

if TYPE_CHECKING:
    from stepscope.tui.screens.start import StartApp

_SCREEN = 8  # lines
_ALL = 1_000_000


def handlers(app: "StartApp") -> Mapping[str, Callable[[], object]]:
    """Action id -> what to do: every action of the table that is for the start screen."""
    return {
        "lane_up": partial(app.move, -1),
        "lane_down": partial(app.move, 1),
        "screen_back": partial(app.move, -_SCREEN),
        "screen_forward": partial(app.move, _SCREEN),
        "oldest": partial(app.move, -_ALL),
        "live": partial(app.move, _ALL),
        "inspect": app.choose_selected,
        "endpoint": partial(app.choose, Choice("ask")),
        "theme": partial(_theme, app),
        "glyphs": partial(_glyphs, app),
        "redraw": partial(_redraw, app),
        "help": partial(_help, app),
        "palette": partial(_palette, app),
        "suspend": app.action_suspend_process,
        "quit": partial(app.exit, None),
    }


def _theme(app: "StartApp") -> None:
    if app.skin.mode in ("dark", "light"):
        app.set_skin(Skin("light" if app.skin.mode == "dark" else "dark", app.skin.ascii_only))


def _glyphs(app: "StartApp") -> None:
    app.set_skin(Skin(app.skin.mode, not app.skin.ascii_only))


def _redraw(app: "StartApp") -> None:
    app.screen.refresh(layout=True)


def _help(app: "StartApp") -> None:
    from stepscope.tui.screens.help import HelpPage  # with all screens, which the list needs not

    app.push_screen(HelpPage(app.skin, app.abilities, "start", log_path()))


def _palette(app: "StartApp") -> None:
    from stepscope.tui.screens.palette import Palette

    def run(action_id: str | None) -> None:
        if action_id is not None:
            app.do(action_id)

    offered = [action for action in app.abilities.on("start") if action.id != "palette"]
    app.push_screen(Palette(app.skin, offered), run)
