"""The command palette, which finds the actions of a screen by their names: Textual's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.text import Text
from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, SimpleProvider
from textual.screen import Screen

from stepscope.tui.settings.action_table import Action

_WORST = 6  # `_rank` of an action whose texts have the words only together


def palette(
    screen: Screen[Any], actions: Sequence[Action], run: Callable[[str], None]
) -> CommandPalette:
    """Return a palette of these actions; it calls `run` with the id of the chosen one."""
    offered = [action for action in actions if action.id != "palette"]
    hint = "what to do (Enter runs it, Esc closes)"
    return Palette([_Actions(screen, offered, run)], placeholder=hint)  # type: ignore[list-item]


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
    def __init__(
        self, screen: Screen[Any], actions: Sequence[Action], run: Callable[[str], None]
    ) -> None:
        super().__init__(screen, [])
        self._offered = [
            (action, f"{action.shown:<9} {action.label:<16} {action.help}", partial(run, action.id))
            for action in actions
        ]

    async def discover(self) -> Hits:
        for _, line, run in self._offered:
            yield DiscoveryHit(Text(line), run, line)

    async def search(self, query: str) -> Hits:
        words = query.lower().split()
        for action, line, run in self._offered:
            rank = _rank(action, words)
            if rank <= _WORST:
                yield Hit(1 - rank / 10, Text(line), run, line)


def _rank(action: Action, words: Sequence[str]) -> int:
    """Return how well an action matches the typed words: 0 is best, above `_WORST` is no match."""
    texts = (action.label.lower(), action.id.replace("_", " "), action.help.lower())
    tests: tuple[Callable[[str], bool], ...] = (
        lambda text: text.startswith(" ".join(words)),
        lambda text: all(word in text for word in words),
    )
    found = [test(text) for test in tests for text in texts]
    return [*found, tests[1](" ".join(texts)), True].index(True)
