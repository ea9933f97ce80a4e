"""The command palette, which finds the actions of a screen by their names: Textual's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.text import Text
from textual.command import CommandListItem, CommandPalette, DiscoveryHit, Hits, SimpleProvider
from textual.screen import Screen

from stepscope.tui.settings.action_table import Action


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
