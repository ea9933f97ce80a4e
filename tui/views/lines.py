"""Lines of styled runs, and the one widget that shows them.

A run is a text with the name of its style. A view (`budget_chart.draw`, `lanes.draw`, ...) is a
pure function from a `Frame` to lines. The widget turns a line into a `Strip` once, keeps the strip
as long as the line stays the same, and refreshes only lines that changed. That makes ten frames a
second cheap.

One character of a line takes one cell: all glyphs do, and text from outside goes through `clean`.
A run without text is a mark for the mouse: the cells right of it, up to an edge, react to clicks
(see `spot`).
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stepscope.tui.views.line_strip import Line as Line
from stepscope.tui.views.line_strip import Painter
from stepscope.tui.views.line_strip import Run as Run
from stepscope.tui.views.theme import Skin

_MARK = "@"
_EDGE: Run = ("│", "frame")
_MAX_PAINTED = 512
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


def spot(kind: str, value: object) -> Run:
    """Return a run that makes the cells after it clickable.

    For a click on them, `Lines.spot_at` returns (kind, value).
    """
    return "", f"{_MARK}{kind}:{value}"


class Lines(Widget):
    """A widget that shows the lines it is given, cut or filled to its size."""

    DEFAULT_CSS = "Lines { position: absolute; width: 1; height: 1; }"
    ALLOW_SELECT = False

    def __init__(self, skin: Skin, *, id: str) -> None:
        super().__init__(id=id)
        self._painter = Painter(skin)
        self._lines: list[Line] = []
        self._strips: list[Strip | None] = []  # one for each line; None if not painted yet
        self._painted: dict[Line, Strip] = {}
        self._width = 0  # the width that all strips were painted for
        self._changed: set[int] = set()  # rows that are not on the screen yet

    @property
    def skin(self) -> Skin:
        return self._painter.skin

    @skin.setter
    def skin(self, skin: Skin) -> None:
        self._painter = Painter(skin)
        self._forget()
        self.refresh()

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines, and ask Textual to draw those that differ from the lines before."""
        self.put(lines)
        self.refresh_changed()

    def put(self, lines: Sequence[Line]) -> None:
        """Replace the lines.

        Those that changed are drawn at `refresh_changed` or `take_changed`.
        """
        before, strips = self._lines, self._strips
        common = min(len(before), len(lines))
        changed = [y for y in range(common) if before[y] != lines[y]]
        changed += range(common, max(len(before), len(lines)))
        if not changed:
            return
        self._lines = list(lines)
        self._strips = strips[: len(lines)] + [None] * (len(lines) - len(strips))
        for y in changed:
            if y < len(lines):
                self._strips[y] = None
        self._changed.update(changed)

    def refresh_changed(self) -> None:
        """Ask Textual to draw what has changed at its next refresh."""
        if self._changed:
            rows = sorted(self._changed)
            self._changed.clear()
            self.refresh(*_bands(rows, self.outer_size.width))

    def touch(self, height: int) -> None:
        """Note that the first `height` lines must be drawn again."""
        self._changed.update(range(height))

    def take_changed(self, region: Region) -> list[tuple[int, Strip]]:
        """Return the changed lines with their screen rows, for a caller that writes them itself.

        Args:
            region: the region of the widget on the screen.
        """
        rows = sorted(self._changed)
        self._changed.clear()
        width = region.width
        return [(region.y + y, self._strip(y, width)) for y in rows if y < region.height]

    def plain_text(self) -> list[str]:
        """Return the lines as shown, without styles."""
        width, height = self.outer_size
        return [self._strip(y, width).text for y in range(height)]

    def content(self, y: int) -> Line:
        """Return line `y` as it was given to the widget; an empty line if there is none."""
        return self._lines[y] if 0 <= y < len(self._lines) else ()

    def spot_at(self, x: int, y: int) -> tuple[str, str] | None:
        """Return the (kind, value) of the clickable spot at a cell.

        None if the cell is not clickable.
        """
        found: tuple[str, str] | None = None
        begin = 0
        for text, style in self.content(y):
            if begin > x:
                break
            if not text and style.startswith(_MARK):
                kind, _, value = style[1:].partition(":")
                found = kind, value
            elif (text, style) == _EDGE:
                found = None
            begin += len(text)
        return found

    def render_lines(self, crop: Region) -> list[Strip]:
        # This bypasses the styles cache: there is no border, padding or filter to apply, and the
        # compositor caches on each strip what it derives from it.
        width = self.outer_size.width  # `size` is slow, and there is no border
        strips = [self._strip(y, width) for y in crop.line_range]
        if crop.column_span == (0, width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def _strip(self, y: int, width: int) -> Strip:
        if width != self._width:
            self._width = width
            self._forget()
        if y >= len(self._lines):
            return self._paint((), width)
        strip = self._strips[y]
        if strip is None:
            strip = self._strips[y] = self._paint(self._lines[y], width)
        return strip

    def _forget(self) -> None:
        self._painted.clear()
        self._strips = [None] * len(self._lines)

    def _paint(self, line: Line, width: int) -> Strip:
        strip = self._painted.get(line)
        if strip is None:
            if len(self._painted) >= _MAX_PAINTED:
                self._painted.clear()
            strip = self._painted[line] = self._painter.strip(line, width)
        return strip


def _bands(rows: Sequence[int], width: int) -> list[Region]:
    """Return full-width regions that cover these rows; adjacent rows share a region.

    Args:
        rows: row numbers in ascending order.
    """
    bands: list[Region] = []
    for y in rows:
        if bands and bands[-1].bottom == y:
            bands[-1] = Region(0, bands[-1].y, width, bands[-1].height + 1)
        else:
            bands.append(Region(0, y, width, 1))
    return bands


def fitted(line: Iterable[Run], width: int) -> Line:
    """Return `line` cut or filled with blanks to `width` cells."""
    line = tuple(line)
    if sum([len(text) for text, _ in line]) == width:
        return line
    runs: list[Run] = []
    left = width
    for text, style in line:
        if not text and style.startswith(_MARK):
            runs.append((text, style))
        if not text or left <= 0:
            continue
        if len(text) > left:
            text = text[:left]
        left -= len(text)
        runs.append((text, style))
    if left > 0:
        runs.append((" " * left, "text"))
    return tuple(runs)


def length_of(line: Iterable[Run]) -> int:
    return sum(len(text) for text, _ in line)


class Field(NamedTuple):
    """A part of a line that is shown whole or not at all.

    Where there is too little room, the field with the highest rank is left out first.
    """

    rank: int
    line: Line


def whole(fields: Sequence[Field], width: int) -> Line:
    """Return a line with as many fields as fit into `width` cells, in the given order."""
    kept = list(fields)
    while len(kept) > 1 and sum(length_of(field.line) for field in kept) > width:
        kept.remove(max(reversed(kept), key=lambda field: field.rank))
    return tuple(run for field in kept for run in field.line)


def first_fitting(forms: Sequence[Line], width: int) -> Line:
    """Return the first of these forms of a line that fits; the last one if none fits."""
    return next((form for form in forms if length_of(form) <= width), forms[-1])


def spread(left: Line, right: Line, width: int, fill: Run = (" ", "text")) -> Line:
    """Return a line of `width` cells with `left` at its left end and `right` at its right end.

    If both do not fit, `left` is cut.
    """
    gap = width - length_of(left) - length_of(right)
    if gap < 0:
        return (*fitted(left, max(0, width - length_of(right))), *right)
    return (*left, (fill[0] * gap, fill[1]), *right)


def framed(
    body: Sequence[Line], width: int, height: int, title: Line, legend: Line = ()
) -> list[Line]:
    """Return `body` in a rounded frame, with a title and, if it fits, a legend in the top edge."""
    if width < 4 or height < 3:
        return [fitted(line, width) for line in body[:height]]
    inner = width - 2
    head: Line = (("─ ", "frame"), *title, (" ", "frame"))
    tail: Line = (*legend, (" ", "frame")) if length_of(legend) else ()
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
    """Return text from outside made safe for a terminal and at most `width` cells wide.

    Without this, control characters would reach the operator's terminal, and wide characters would
    break the columns.
    """
    text = _UNPRINTABLE.sub("?", text)
    if not text.isascii():
        text = "".join(char if cell_len(char) == 1 else "?" for char in text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[: max(0, width)]
