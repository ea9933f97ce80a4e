"""`Notices`: the line that tells the operator what was done and what is wrong."""

import re
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from stepscope.tui.views import format as fmt
from stepscope.tui.views.lines import Line, Run, clean, length_of

Tone: TypeAlias = Literal["text", "good", "breach", "muted", "caution"]

_SHOWN_S = 8.0
_ERROR_SHOWN_S = 20.0
_REFUSAL_SHOWN_S = 5.0
_BETWEEN: Run = ("  │  ", "frame")
_LEAST = 24  # cells kept for standing notices beside a new one
_PATH = re.compile(r"(?<!\S)~?/\S+")


class Notices:
    """Shows the last notice until it expires, and after it the standing notices."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text = ""
        self._shorter: Sequence[str] = ()
        self._tone: Tone = "text"
        self._until_s = 0.0
        self._is_of_place = False
        self._later: deque[tuple[str, Tone]] = deque()

    def say(self, text: str, tone: Tone = "text", shorter: Sequence[str] = ()) -> None:
        """Show a notice now.

        Args:
            shorter: the same in fewer words, for lines in which `text` does not fit.
        """
        self._text, self._shorter = text, shorter
        self._tone = tone
        shown_s = _ERROR_SHOWN_S if tone in ("breach", "caution") else _SHOWN_S
        self._until_s = self._clock() + shown_s
        self._is_of_place = False

    def say_later(self, text: str, tone: Tone = "text") -> None:
        """Queue a notice behind the current one, which the operator has time to read first."""
        self._later.append((text, tone))

    def say_after_place(self, text: str, tone: Tone = "text") -> None:
        """Show a result now, or queue it if a notice of this place is still shown.

        That leaves the operator time to read the notice of the place.
        """
        if self._is_of_place and self._is_said():
            self.say_later(text, tone)
        else:
            self.say(text, tone)

    def refuse(self, text: str, shorter: Sequence[str] = ()) -> None:
        """Show why a key does nothing, briefly, and only while this page and step are shown."""
        self.say(text, "caution", shorter)
        self._until_s = self._clock() + _REFUSAL_SHOWN_S
        self._is_of_place = True

    def say_of_place(self, text: str, tone: Tone = "text", shorter: Sequence[str] = ()) -> None:
        """Show a notice that holds only while this page and step are shown; see `say`."""
        self.say(text, tone, shorter)
        self._is_of_place = True

    def leave_place(self) -> None:
        """Drop a notice of a place, because another page or step is shown now."""
        if self._is_of_place:
            self.dismiss()

    def dismiss(self) -> None:
        self._text = ""

    def lines(self, width: int, most: int) -> list[Line]:
        """Return the current notice in at most `most` lines; no lines if there is no notice."""
        if not self._is_said():
            return []
        room = max(1, width - 1)
        parts = textwrap.wrap(clean(self._text, len(self._text)), room) or [""]
        if len(parts) > most:
            parts[most - 1 :] = [" ".join(parts[most - 1 :])]
        return [((" ", "text"), (clean(part, room), self._tone)) for part in parts]

    def line(self, standing: list[tuple[str, Tone]], width: int) -> Line:
        """Return the current notice, and after it the `standing` ones: still wrong or pending.

        If they do not all fit, the current notice gets most of the room: the others stay when it is
        gone.
        """
        parts, new = list(standing), 0
        if self._is_said():
            parts.insert(0, (self._text, self._tone))
            new = 1
        if not parts:
            return ()
        room = width - 1 - (len(parts) - 1) * length_of((_BETWEEN,))
        lengths = [len(text) for text, _ in standing]
        shares: list[int] = []
        if new:
            most = max(_LEAST, room - sum(min(length, _LEAST) for length in lengths))
            text = fmt.first_fitting((self._text, *self._shorter), most)
            parts[0] = text, self._tone
            shares = [min(len(text), most)]
        shares += _shares(lengths, room - sum(shares))
        line: Line = ((" ", "text"),)
        for idx, ((text, tone), share) in enumerate(zip(parts, shares, strict=True)):
            if idx:
                line = (*line, _BETWEEN)
            line = (*line, (clean(_with_short_paths(text, share), share), tone))
        return line

    def _is_said(self) -> bool:
        """Whether a notice is shown now; if none is, show the next one in the queue."""
        if self._text and self._clock() < self._until_s:
            return True
        if not self._later:
            return False
        self.say(*self._later.popleft())
        return True


def _with_short_paths(text: str, width: int) -> str:
    """Cut folders from the front of paths if the text is too long: the end matters most."""
    for path in _PATH.findall(text):
        excess = len(text) - width
        if excess <= 0:
            break
        folders = path.split("/")
        if len(folders) < 3:
            continue
        while len(folders) > 2 and len(path) - len("/".join(["…", *folders[1:]])) < excess:
            del folders[0]
        text = text.replace(path, "/".join(["…", *folders[1:]]), 1)
    return text


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return the cells for each of several texts: short ones leave their surplus to long ones."""
    shares = [0] * len(lengths)
    for num_done, idx in enumerate(sorted(range(len(lengths)), key=lambda idx: lengths[idx])):
        shares[idx] = min(lengths[idx], max(10, room // (len(lengths) - num_done)))
        room -= shares[idx]
    return shares
