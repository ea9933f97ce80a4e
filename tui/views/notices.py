"""`Notices`: the line of the screen that tells the operator what was done and what is wrong.

Each notice has a tone, the name of the style that it is shown in.
"""

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
_BRACKETS = re.compile(r" \([^)]*\)")
_LONG_PATH = re.compile(r"(?<!\S)[~…]?/[^/\s]+/(\S+)")


class Notices:
    """Keeps the notices, one until it expires and those that stand, and makes their line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text = ""
        self._tone: Tone = "text"
        self._until_s = 0.0
        self._is_of_place = False
        self._later: deque[tuple[str, Tone]] = deque()

    def say(self, text: str, tone: Tone = "text") -> None:
        """Show a notice now, in place of the current one.

        Where it does not fit, what stands in brackets is left out, then its end.
        """
        shown_s = _ERROR_SHOWN_S if tone in ("breach", "caution") else _SHOWN_S
        self._text, self._tone, self._until_s = text, tone, self._clock() + shown_s
        self._is_of_place = False

    def warn(self, text: str) -> None:
        self.say(text, "caution")

    def say_later(self, text: str, tone: Tone = "text") -> None:
        """Queue a notice, to be shown when the current one has had its time."""
        self._later.append((text, tone))

    def refuse(self, text: str) -> None:
        """Show briefly, on this page and step, why a key does nothing."""
        self.warn(text)
        self._until_s = self._clock() + _REFUSAL_SHOWN_S
        self._is_of_place = True

    def say_of_place(self, text: str, tone: Tone = "text") -> None:
        """Show a notice that is true only for this page and step; `leave_place` drops it."""
        self.say(text, tone)
        self._is_of_place = True

    def leave_place(self) -> None:
        """Drop a notice that is true only for a page or step that is no longer shown."""
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
        """Return the current notice, with most of the room, then the `standing` ones."""
        is_said = self._is_said()
        room = width - 1 - (len(standing) + is_said - 1) * length_of((_BETWEEN,))
        lengths = [len(text) for text, _ in standing]
        parts: list[Run] = []
        if is_said:
            most = max(_LEAST, room - sum(min(length, _LEAST) for length in lengths))
            text = fmt.first_fitting((self._text, _BRACKETS.sub("", self._text)), most)
            parts.append((_shortened(text, most), self._tone))
            room -= min(len(text), most)
        shares = _shares(lengths, room)
        for (text, tone), share in zip(standing, shares, strict=True):
            parts.append((_shortened(text, share), tone))
        line = [run for part in parts for run in (_BETWEEN, part)]
        return ((" ", "text"), *line[1:]) if line else ()

    def _is_said(self) -> bool:
        """Whether a notice is shown now. If none is, this shows the next one of the queue."""
        if self._text and self._clock() < self._until_s:
            return True
        if not self._later:
            return False
        self.say(*self._later.popleft())
        return True


def _shortened(text: str, width: int) -> str:
    """Return a text that fits: its paths lose folders at the front, then it loses its end."""
    while len(text) > width and (path := _LONG_PATH.search(text)):
        text = text.replace(path[0], f"…/{path[1]}", 1)
    return clean(text, width)


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many cells each of several texts gets; short ones leave the rest to long."""
    shares = [0] * len(lengths)
    for num_done, idx in enumerate(sorted(range(len(lengths)), key=lambda idx: lengths[idx])):
        shares[idx] = min(lengths[idx], max(10, room // (len(lengths) - num_done)))
        room -= shares[idx]
    return shares
