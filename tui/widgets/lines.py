"""Lines of styled runs, and the one widget that shows them.

A view (`budget_chart.draw`, `lanes.draw`, ...) is a pure function from a `Frame` to lines; the
widget turns a line into a `Strip` once, keeps it for as long as the line stays the same, and
refreshes only lines that changed. That is what makes ten frames a second cheap.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stepscope.tui.theme import Skin

Run: TypeAlias = tuple[str, str]  # text, style name
Line: TypeAlias = tuple[Run, ...]

_MAX_STRIPS = 1024
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


class Lines(Widget):
    """Shows lines that somebody else computed, cut or filled to its size."""

    DEFAULT_CSS = "Lines { position: absolute; width: 1; height: 1; }"
    ALLOW_SELECT = False

    def __init__(self, skin: Skin, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._skin = skin
        self._lines: list[Line] = []
        self._strips: dict[tuple[Line, int], Strip] = {}

    @property
    def skin(self) -> Skin:
        return self._skin

    @skin.setter
    def skin(self, skin: Skin) -> None:
        self._skin = skin
        self._strips.clear()
        self.refresh()

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the content; only lines that differ are drawn again."""
        before, self._lines = self._lines, list(lines)
        height, width = self.size.height, self.size.width
        changed = [
            y
            for y in range(height)
            if (before[y] if y < len(before) else ()) != (lines[y] if y < len(lines) else ())
        ]
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def plain_text(self) -> list[str]:
        """What is shown, without styles."""
        return [self._strip(y).text for y in range(self.size.height)]

    def render_lines(self, crop: Region) -> list[Strip]:
        # Not through the styles cache: there is no border, padding or filter to apply here, and
        # the compositor caches what it derives from a strip on that strip.
        strips = [self._strip(y) for y in crop.line_range]
        if crop.column_span == (0, self.size.width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def _strip(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else ()
        key = (line, self.size.width)
        strip = self._strips.get(key)
        if strip is None:
            if len(self._strips) >= _MAX_STRIPS:
                self._strips.clear()
            strip = self._strips[key] = self._paint(line, self.size.width)
        return strip

    def _paint(self, line: Line, width: int) -> Strip:
        skin = self._skin
        segments = [
            Segment(skin.text(text), skin.style(style)) for text, style in fitted(line, width)
        ]
        return Strip(segments, width)


def fitted(line: Iterable[Run], width: int) -> Line:
    """`line` cut or filled with blanks to `width` cells, neighbours of one style joined."""
    runs: list[Run] = []
    left = width
    for text, style in line:
        if not text or left <= 0:
            continue
        length = width_of(text)
        if length > left:
            text, length = set_cell_size(text, left), left
        left -= length
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + text, style)
        else:
            runs.append((text, style))
    if left > 0:
        runs.append((" " * left, "text"))
    return tuple(runs)


def width_of(text: str) -> int:
    """Width in cells."""
    return len(text) if text.isascii() else cell_len(text)


def length_of(line: Iterable[Run]) -> int:
    return sum(width_of(text) for text, _ in line)


def spread(left: Line, right: Line, width: int, fill: Run = (" ", "text")) -> Line:
    """`left` and `right` at the two ends of `width` cells; what does not fit is cut from `left`."""
    gap = width - length_of(left) - length_of(right)
    if gap < 0:
        return (*fitted(left, max(0, width - length_of(right))), *right)
    return (*left, (fill[0] * gap, fill[1]), *right)


def framed(
    body: Sequence[Line], width: int, height: int, title: Line, legend: Line = ()
) -> list[Line]:
    """A rounded frame around `body`, with a title and, where it fits, a legend in its top edge."""
    if width < 4 or height < 3:
        return [fitted(line, width) for line in body[:height]]
    inner = width - 2
    head: Line = (("─ ", "frame"), *title, (" ", "frame"))
    tail: Line = (*legend, (" ", "frame")) if legend else ()
    if length_of(head) + length_of(tail) + 2 > inner:
        tail = ()
    if tail:
        tail = ((" ", "frame"), *tail)
    lines: list[Line] = [
        (("╭", "frame"), *spread(head, tail, inner, ("─", "frame")), ("╮", "frame"))
    ]
    for y in range(height - 2):
        line = body[y] if y < len(body) else ()
        lines.append((("│", "frame"), *fitted(line, inner), ("│", "frame")))
    lines.append((("╰" + "─" * inner + "╯", "frame"),))
    return lines


def clean(text: str, width: int) -> str:
    """Text from outside, safe for a terminal and at most `width` cells wide.

    Control characters would otherwise reach the operator's terminal, and wide ones break columns.
    """
    text = _UNPRINTABLE.sub("?", text)
    if not text.isascii():
        text = "".join(char if cell_len(char) == 1 else "?" for char in text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[: max(0, width)]
