"""`Prompt`: a line to type into, above the footer."""

import textwrap
from collections.abc import Callable

from textual.geometry import Region

from stepscope.tui.screens.overlays.overlay import Overlay
from stepscope.tui.views.lines import Line, Run, clean
from stepscope.tui.views.theme import Skin

_MAX_LENGTH = 4_096  # the longest path of Linux
_MIN_ROOM = 22  # cells kept free for the typed text
_MOST_BENEATH = 4  # lines of a note, or of an error that does not fit beside the text
_KEEPS = frozenset({"left", "right", "home", "end"})  # keys that keep the selected text


class Prompt(Overlay[str]):
    """Asks for one line of text. Enter closes the prompt with the text, Escape without.

    With `submit`, the prompt stays open until the caller dismisses it. Checking the text may then
    take a while, and the operator can correct a wrong text.

    Args:
        text: the initial text. It is selected: typing replaces it, an arrow key keeps it.
        check: returns one line about what is wrong with a text, or None if it is fine.
        submit: gets a text that passed `check`; `refuse` may still reject it later.
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
        self._is_selected = bool(text)
        self._check = check
        self._submit = submit
        self._note = note
        self._wrong: str | None = None
        self._is_waiting = False

    def refuse(self, text: str) -> None:
        """Show what is wrong with the submitted text; the prompt stays open."""
        self._is_waiting, self._wrong = False, text
        self.redraw()

    def place(self, width: int, height: int) -> Region:
        num_rows = min(1 + len(self._beneath(width)), max(1, height - 1))
        return Region(0, max(0, height - 1 - num_rows), width, num_rows)

    def lines(self, width: int, height: int) -> list[Line]:
        beneath = self._beneath(width)
        wrong = "" if self._wrong is None or not self._fits(width) else f"  {self._wrong}"
        if self._is_waiting:
            wrong = "  …"
        question = f" {clean(self._question, max(1, width - _MIN_ROOM))} "
        if len(question) + len(self._text) + 1 + len(wrong) > width and wrong:
            question = " "  # the error matters more than the question
        room = max(1, width - len(question) - 2)
        typed = self._text[-room:]
        line: Line = (
            (question, "edit"),
            (clean(typed, room), "selected" if self._is_selected else "edit"),
            ("_", "edit"),
            (clean(wrong, max(0, room - len(typed))), "caution"),
        )
        rest = max(0, width - sum(len(text) for text, _ in line))
        hint = self._hint()
        return [
            (*line, (f"{hint if len(hint) < rest else '':<{rest}}", "edit")),
            *(((f" {clean(each, width - 1):<{width - 1}}", style),) for each, style in beneath),
        ]

    def _hint(self) -> str:
        if self._is_selected:
            return self.hint("  typing replaces it, → keeps it")
        return "  ^u empties it" if self._wrong is not None else ""

    def _beneath(self, width: int) -> list[Run]:
        """Return the lines below the typed text: a long error, or a note."""
        is_note = self._wrong is None or self._fits(width)
        text = self._note if is_note else self._wrong or ""
        lines = textwrap.wrap(text, max(1, width - 2))[:_MOST_BENEATH]
        return [(line, "edit" if is_note else "caution") for line in lines]

    def _fits(self, width: int) -> bool:
        return self._wrong is None or len(self._text) + len(self._wrong) + 4 <= width

    def pressed(self, key: str, character: str | None) -> None:
        if key == "enter":
            if self._is_waiting:
                return
            self._is_selected = False
            self._wrong = None if self._check is None else self._check(self._text)
            if self._wrong is None and self._submit is not None:
                self._is_waiting = True
                self._submit(self._text)
            elif self._wrong is None:
                self.dismiss(self._text)
        elif key in _KEEPS:
            self._is_selected = False
        elif key == "backspace":
            self._become("" if self._is_selected else self._text[:-1])
        elif key == "ctrl+u" or (key == "delete" and self._is_selected):
            self._become("")
        elif character is not None:
            self.insert(character)

    def insert(self, text: str) -> None:
        if text:
            before = "" if self._is_selected else self._text
            self._become((before + text)[:_MAX_LENGTH])

    def _become(self, text: str) -> None:
        self._text, self._wrong, self._is_selected = text, None, False
