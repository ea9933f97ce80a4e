"""A line to type into, above the footer."""

import textwrap
from collections.abc import Callable

from textual.geometry import Region

from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.theme import Skin
from stepscope.tui.widgets.lines import Line, clean

_MAX_LENGTH = 200
_MIN_ROOM = 22  # cells to type in
_MOST_BENEATH = 4  # lines of a note, or about what is wrong where it does not fit beside the text


class Prompt(Overlay[str]):
    """Asks for one line of text; Enter gives it, Escape nothing.

    With `submit` it stays open until somebody else dismisses it: what became of the text may take
    a while, and where it was wrong it is mended rather than typed again.

    Args:
        question: what is asked, with an example.
        text: to begin with.
        check: one line about what is wrong with a text, None when it is fine.
        submit: takes a text that is fine; `refuse` says later what is wrong with it after all.
        note: what there is to know, in lines of its own.
    """

    def __init__(
        self,
        skin: Skin,
        question: str,
        text: str = "",
        check: Callable[[str], str | None] | None = None,
        submit: Callable[[str], None] | None = None,
        note: str = "",
    ) -> None:
        super().__init__(skin)
        self._question = question
        self._text = text
        self._check = check
        self._submit = submit
        self._note = note
        self._wrong: str | None = None
        self._is_waiting = False

    def refuse(self, text: str) -> None:
        """What is wrong with the text that was submitted."""
        self._is_waiting, self._wrong = False, text
        self.redraw()

    def place(self, width: int, height: int) -> Region:
        num_rows = min(1 + len(self._beneath(width)), max(1, height - 1))
        return Region(0, max(0, height - 1 - num_rows), width, num_rows)

    def lines(self, width: int, height: int) -> list[Line]:
        beneath = self._beneath(width)
        style = "edit" if self._fits(width) else "breach"
        wrong = "" if self._wrong is None or not self._fits(width) else f"  {self._wrong}"
        if self._is_waiting:
            wrong = "  …"
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
        return [
            (*line, (" " * max(0, rest), "edit")),
            *(((f" {clean(each, width - 1):<{width - 1}}", style),) for each in beneath),
        ]

    def _beneath(self, width: int) -> list[str]:
        """What is wrong, in lines of its own where there is no room for it; else the note."""
        text = self._note if self._wrong is None or self._fits(width) else self._wrong
        return textwrap.wrap(text, max(1, width - 2))[:_MOST_BENEATH]

    def _fits(self, width: int) -> bool:
        """What is wrong has room beside what was typed."""
        return self._wrong is None or len(self._text) + len(self._wrong) + 4 <= width

    def pressed(self, key: str, character: str | None) -> None:
        if key == "enter":
            if self._is_waiting:
                return
            self._wrong = None if self._check is None else self._check(self._text)
            if self._wrong is None and self._submit is not None:
                self._is_waiting = True
                self._submit(self._text)
            elif self._wrong is None:
                self.dismiss(self._text)
        elif key == "backspace":
            self._text, self._wrong = self._text[:-1], None
        elif key == "ctrl+u":
            self._text, self._wrong = "", None
        elif character is not None and len(self._text) < _MAX_LENGTH:
            self._text, self._wrong = self._text + character, None
