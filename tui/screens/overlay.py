"""Dialogs above a screen: `Overlay`, their base class, and `Prompt`, a line to type into.

An overlay has one widget, a box, and gets all keys.
"""

import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.geometry import Region
from textual.screen import ModalScreen

from stepscope.tui.settings.key_names import spelled
from stepscope.tui.views.lines import Line, Lines, Run, clean, length_of
from stepscope.tui.views.theme import Skin

log = logging.getLogger("stepscope.tui")

_MAX_LENGTH = 4_096  # of a typed text: the longest path of Linux
_MIN_ROOM = 22  # cells kept free for the typed text
_MOST_BENEATH = 4  # lines of a note or an error
_KEEPS = frozenset({"left", "right", "home", "end"})  # keys that keep the selected text
_Result = TypeVar("_Result")


def pasted_line(text: str) -> str:
    """Return the first line of a pasted text that is not blank, without control characters."""
    line = next((each for each in text.splitlines() if each.strip()), "")
    return "".join(filter(str.isprintable, line))


class Overlay(ModalScreen[_Result], Generic[_Result]):
    """A modal screen that shows `lines` in a box at `place`; Escape closes it without a result."""

    DEFAULT_CSS = "Overlay { background: transparent; }"

    def __init__(self, skin: Skin) -> None:
        super().__init__()
        self.skin = skin
        self._box = Lines(skin, id="overlay")

    def compose(self) -> ComposeResult:
        yield self._box

    def place(self, width: int, height: int) -> Region:
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Line]:
        raise NotImplementedError

    def pressed(self, key: str, character: str | None) -> None:
        raise NotImplementedError

    def insert(self, text: str) -> None:
        """Append typed or pasted text to the text field. An overlay without one ignores it."""

    def clicked(self, x: int, y: int) -> None:
        """Handle a click on this cell of the box. (A click beside the box closes the overlay.)"""

    def hint(self, text: str) -> str:
        """Return `text` with the arrow keys written in glyphs that this terminal can show."""
        return spelled(text) if self.skin.ascii_only else text

    def redraw(self) -> None:
        region = self.place(*self.size)
        styles = self._box.styles
        styles.offset = (region.x, region.y)
        styles.width, styles.height = max(1, region.width), max(1, region.height)
        self._box.show(self.lines(region.width, region.height))

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.redraw()

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if not self.is_current:  # typed in one burst with the key that closed it
            self.app.post_message(events.Key(event.key, event.character))
            return
        if event.key == "escape":
            self.dismiss(None)
            return
        with self._failures_logged():
            self.pressed(event.key, event.character if event.is_printable else None)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if not self.is_current:
            self.app.post_message(events.Paste(event.text))
            return
        with self._failures_logged():
            self.insert(pasted_line(event.text))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if not self.is_current:  # the click was meant for this overlay, which has just closed
            return
        if event.widget is not self._box:
            self.dismiss(None)
            return
        with self._failures_logged():
            self.clicked(event.x, event.y)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._scroll(event, "up")

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._scroll(event, "down")

    def _scroll(self, event: events.MouseEvent, key: str) -> None:
        event.stop()
        if self.is_current:
            with self._failures_logged():
                self.pressed(key, None)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """A context for keys and clicks: redraws the box, or logs an error and closes."""
        try:
            yield
            if self.is_current:
                self.redraw()
        except Exception:
            log.exception("%s failed", type(self).__name__)
            self.dismiss(None)


class Prompt(Overlay[str]):
    """Asks for one line of text. Enter closes the prompt with the text, Escape without.

    With `submit`, the prompt stays open until the caller dismisses it: checking may take a while,
    and the operator can correct a wrong text.

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
        question = f" {clean(self._question, max(1, width - _MIN_ROOM))} "
        room = max(1, width - len(question) - 2)
        line: Line = (
            (question, "edit"),
            (clean(self._text[-room:], room), "selected" if self._is_selected else "edit"),
            ("_  …" if self._is_waiting else "_", "edit"),
        )
        rest = max(0, width - length_of(line))
        hint = "" if self._wrong is None else "  ^u empties it"
        if self._is_selected:
            hint = self.hint("  typing replaces it, → keeps it")
        return [
            (*line, (f"{hint if len(hint) < rest else '':<{rest}}", "edit")),
            *(
                ((f" {clean(each, width - 1):<{width - 1}}", style),)
                for each, style in self._beneath(width)
            ),
        ]

    def _beneath(self, width: int) -> list[Run]:
        """Return the lines below the typed text: an error, or a note."""
        text, style = (self._note, "edit") if self._wrong is None else (self._wrong, "caution")
        lines = textwrap.wrap(text, max(1, width - 2))[:_MOST_BENEATH]
        return [(line, style) for line in lines]

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
