"""`Notices`: the one line that tells the operator what was done and what is wrong."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from stepscope.tui.widgets.lines import Line, Run, clean, length_of

Tone: TypeAlias = Literal["text", "good", "breach", "muted", "caution"]

_SHOWN_S = 8.0
_ERROR_SHOWN_S = 20.0
_REFUSAL_SHOWN_S = 5.0
_BETWEEN: Run = ("  │  ", "frame")


class Notices:
    """The last thing said, until it is old; what is still wrong stands before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text = ""
        self._tone: Tone = "text"
        self._until_s = 0.0
        self._is_of_place = False

    def say(self, text: str, tone: Tone = "text") -> None:
        self._text = text
        self._tone = tone
        shown_s = _ERROR_SHOWN_S if tone in ("breach", "caution") else _SHOWN_S
        self._until_s = self._clock() + shown_s
        self._is_of_place = False

    def refuse(self, text: str) -> None:
        """Why a key does nothing: only of interest right after it, on the screen it was for."""
        self.say(text, "caution")
        self._until_s = self._clock() + _REFUSAL_SHOWN_S
        self._is_of_place = True

    def say_of_place(self, text: str, tone: Tone = "text") -> None:
        """What is true at this step, on this screen: it goes with either."""
        self.say(text, tone)
        self._is_of_place = True

    def leave_place(self) -> None:
        """Another screen or another step is shown now."""
        if self._is_of_place:
            self.dismiss()

    def dismiss(self) -> None:
        self._text = ""

    def lines(self, width: int, most: int) -> list[Line]:
        """What is said now in as many lines as it needs, `most` at most; none of nothing."""
        if not self._text or self._clock() >= self._until_s:
            return []
        room = max(1, width - 1)
        parts = textwrap.wrap(clean(self._text, len(self._text)), room) or [""]
        if len(parts) > most:
            parts[most - 1 :] = [" ".join(parts[most - 1 :])]
        return [((" ", "text"), (clean(part, room), self._tone)) for part in parts]

    def line(self, standing: list[tuple[str, Tone]], width: int) -> Line:
        """What is said now, and before it what is `standing`: still wrong, or still pending."""
        parts = list(standing)
        if self._text and self._clock() < self._until_s:
            parts.insert(0, (self._text, self._tone))
        if not parts:
            return ()
        room = width - 1 - (len(parts) - 1) * length_of((_BETWEEN,))
        shares = _shares([len(text) for text, _ in parts], room)
        line: Line = ((" ", "text"),)
        for idx, ((text, tone), share) in enumerate(zip(parts, shares, strict=True)):
            if idx:
                line = (*line, _BETWEEN)
            line = (*line, (clean(text, share), tone))
        return line


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Cells for each of several texts: what the short ones leave is for the long ones."""
    shares = [0] * len(lengths)
    for num_done, idx in enumerate(sorted(range(len(lengths)), key=lambda idx: lengths[idx])):
        shares[idx] = min(lengths[idx], max(10, room // (len(lengths) - num_done)))
        room -= shares[idx]
    return shares
