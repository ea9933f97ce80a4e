"""The command palette: the operator types part of an action's name to find and run it.

It offers the actions that work on the shown page.
"""

from typing import NamedTuple

from textual.geometry import Region

from stepscope.tui.screens.overlays.overlay import Overlay
from stepscope.tui.settings.action_table import Action
from stepscope.tui.views.framed_panels import first_shown
from stepscope.tui.views.lines import Line, clean, fitted, framed
from stepscope.tui.views.theme import Skin

_WIDTH, _MAX_ROWS = 96, 14
_KEY_WIDTH, _LABEL_WIDTH = 9, 16


class _Found(NamedTuple):
    rank: int
    action: Action


class Palette(Overlay[str]):
    """Lets the operator choose an action by Enter or a click; the result is the action's id."""

    def __init__(self, skin: Skin, actions: list[Action]) -> None:
        super().__init__(skin)
        self._actions = actions
        self._typed = ""
        self._at = 0

    def found(self) -> list[Action]:
        """Return the actions that match the typed text, best match first."""
        words = self._typed.lower().split()
        ranked = [_Found(_rank(action, words), action) for action in self._actions]
        shown = [each for each in ranked if each.rank >= 0]
        return [each.action for each in sorted(shown, key=lambda each: each.rank)]

    def place(self, width: int, height: int) -> Region:
        box_width = min(width, _WIDTH)
        box_height = min(height, _MAX_ROWS + 3)
        return Region((width - box_width) // 2, min(3, height - box_height), box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        found, room = self.found(), max(1, height - 3)
        self._at = max(0, min(self._at, len(found) - 1))
        first = first_shown(len(found), room, self._at)
        body: list[Line] = [((f" {clean(self._typed, max(0, width - 5))}_", "strong"),)]
        for number in range(first, min(len(found), first + room)):
            body.append(self._row(found[number], number == self._at, width - 2))
        if not found:
            body.append(((" no action has this name", "muted"),))
        hint: Line = ((self.hint("type ↑/↓ choose Enter runs it Esc"), "muted"),)
        return framed(body, width, height, (("what to do", "title"),), hint)

    def _row(self, action: Action, is_chosen: bool, width: int) -> Line:
        mark = "+cursor" if is_chosen else ""
        line: Line = (
            ("▶ " if is_chosen else "  ", f"text{mark}"),
            (f"{clean(action.shown, _KEY_WIDTH):<{_KEY_WIDTH}}", f"key{mark}"),
            (f"{clean(action.label, _LABEL_WIDTH):<{_LABEL_WIDTH}} ", f"text{mark}"),
            (clean(action.help, max(0, width - _KEY_WIDTH - _LABEL_WIDTH - 4)), f"muted{mark}"),
        )
        return fitted(line, width)

    def pressed(self, key: str, character: str | None) -> None:
        steps = {"down": 1, "up": -1, "pagedown": _MAX_ROWS, "pageup": -_MAX_ROWS}
        if key in steps:
            self._at += steps[key]
        elif key == "enter":
            found = self.found()
            self.dismiss(found[self._at].id if self._at < len(found) else None)
        elif key == "backspace":
            self._typed, self._at = self._typed[:-1], 0
        elif key == "ctrl+u":
            self._typed, self._at = "", 0
        elif character is not None:
            self.insert(character)

    def insert(self, text: str) -> None:
        self._typed, self._at = (self._typed + text)[:60], 0

    def clicked(self, x: int, y: int) -> None:
        found, room = self.found(), self._room()
        number = first_shown(len(found), room, self._at) + y - 2
        if y >= 2 and number < len(found):
            self.dismiss(found[number].id)

    def _room(self) -> int:
        return max(1, self.place(*self.size).height - 3)


def _rank(action: Action, words: list[str]) -> int:
    """Return how well an action matches the typed words: 0 is the best match, -1 is no match."""
    label, name = action.label.lower(), action.id.replace("_", " ")
    texts = (label, name, action.help.lower())
    if not words:
        return 0
    typed = " ".join(words)
    for rank, text in enumerate(texts):
        if text.startswith(typed):
            return rank
    for rank, text in enumerate(texts, len(texts)):
        if all(word in text for word in words):
            return rank
    return 2 * len(texts) if all(word in " ".join(texts) for word in words) else -1
