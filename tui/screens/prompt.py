"""A line to type into, above the footer."""

from collections.abc import Callable

from textual.geometry import Region

from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.theme import Skin
from stepscope.tui.widgets.lines import Line, clean

_MAX_LENGTH = 200
_MIN_ROOM = 22  # cells to type in


class Prompt(Overlay[str]):
    """Asks for one line of text; Enter gives it, Escape nothing.

    Args:
        question: what is asked, with an example.
        text: to begin with.
        check: one line about what is wrong with a text, None when it is fine.
    """

    def __init__(
        self,
        skin: Skin,
        question: str,
        text: str = "",
        check: Callable[[str], str | None] | None = None,
    ) -> None:
        super().__init__(skin)
        self._question = question
        self._text = text
        self._check = check
        self._wrong: str | None = None

    def place(self, width: int, height: int) -> Region:
        return Region(0, max(0, height - 2), width, 1)

    def lines(self, width: int, height: int) -> list[Line]:
        wrong = "" if self._wrong is None else f"  {self._wrong}"
        question = f" {clean(self._question, max(1, width - _MIN_ROOM))} "
        if len(question) + len(self._text) + 1 + len(wrong) > width and wrong:
            question = " "  # what is wrong is worth more than what was asked
        room = max(1, width - len(question) - 2)
        typed = self._text[-room:]
        line: Line = (
            (question, "edit"),
            (clean(typed, room), "edit"),
            ("_", "edit"),
            (clean(wrong, max(0, room - len(typed))), "breach"),
        )
        rest = width - sum(len(text) for text, _ in line)
        return [(*line, (" " * max(0, rest), "edit"))]

    def pressed(self, key: str, character: str | None) -> None:
        if key == "enter":
            self._wrong = None if self._check is None else self._check(self._text)
            if self._wrong is None:
                self.dismiss(self._text)
        elif key == "backspace":
            self._text, self._wrong = self._text[:-1], None
        elif key == "ctrl+u":
            self._text, self._wrong = "", None
        elif character is not None and len(self._text) < _MAX_LENGTH:
            self._text, self._wrong = self._text + character, None
