"""What Textual itself needs: our keys as bindings, our actions as its palette, our colours.

The bindings have priority: the application handles a key before it takes the next one. Otherwise a
key typed in one burst with the key that opens an overlay could reach the screen below it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import CommandListItem, CommandPalette, DiscoveryHit, Hits, SimpleProvider
from textual.screen import Screen
from textual.theme import Theme

from stepscope.tui.settings.action_table import Action, Place
from stepscope.tui.settings.actions import ACTIONS, BY_ID
from stepscope.tui.views.theme import BY_MODE, ColourMode

_NEVER = "no_key"  # no terminal sends it: the key of an action without one


def bindings(places: Iterable[Place]) -> list[BindingType]:
    """Return the default keys of the actions of these screens, which run them in `action_do`."""
    return [
        Binding(_keys(each), f"do('{each.id}')", each.label, show=False, priority=True, id=each.id)
        for each in ACTIONS
        if not each.pages.isdisjoint(places)
    ]


def keymap(actions: Iterable[Action]) -> dict[str, str]:
    """Return the keys of the actions that have others than the default ones, by action id."""
    return {each.id: _keys(each) for each in actions if each.keys != BY_ID[each.id].keys}


def _keys(action: Action) -> str:
    return ",".join(action.keys) or _NEVER


def use_colours(app: App[Any], mode: ColourMode) -> None:
    """Let Textual draw in the colours of this mode; the terminal's own if it has few or none."""
    if mode not in ("dark", "light"):
        app.theme = "ansi-dark"
        return
    colours, name = BY_MODE[mode], f"stepscope-{mode}"
    theme = Theme(
        name,
        primary=colours["accent"],
        foreground=colours["text"],
        background=colours["background"],
        surface=colours["raised"],
        panel=colours["raised"],
        dark=mode == "dark",
    )
    app.register_theme(theme)
    app.theme = name


def palette(
    screen: Screen[Any], actions: Sequence[Action], run: Callable[[str], None]
) -> CommandPalette:
    """Return a palette of these actions; it calls `run` with the id of the chosen one."""
    lines: list[CommandListItem] = [
        (f"{each.shown:<9} {each.label:<16} {each.help}", partial(run, each.id))
        for each in actions
        if each.id != "palette"
    ]
    hint = "what to do (Enter runs it, Esc closes)"
    return Palette([_Actions(screen, lines)], placeholder=hint)  # type: ignore[list-item]


class Palette(CommandPalette):
    """Textual's palette, without glyphs and frames that a terminal may lack."""

    DEFAULT_CSS = """
    Palette { background: transparent; }
    Palette > Vertical { max-width: 100; }
    Palette SearchIcon { display: none; }
    Palette #--input { border: none; padding: 0 1; }
    Palette CommandInput, Palette CommandInput:focus { border: none; height: 1; }
    Palette CommandList, Palette CommandList:focus {
        border: none; max-height: 22; scrollbar-size-vertical: 0;
    }
    Palette CommandList > .option-list--option { padding: 0 1; text-style: none; }
    """


class _Actions(SimpleProvider):
    async def discover(self) -> Hits:
        async for hit in super().discover():
            # As text: the line has keys such as `[`, which would be read as markup.
            line = hit.text or ""
            yield DiscoveryHit(Text(line), hit.command, line)
