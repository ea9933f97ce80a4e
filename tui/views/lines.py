"""Lines of styled runs, and the widget that shows them.

A run is a text with the name of its style. A view (`budget_chart.draw`, `lanes.draw`, ...) is a
pure function from a `Frame` to lines. The widget turns a line into a `Strip` once, keeps the strip
as long as the line stays the same, and refreshes only lines that changed. That makes ten frames a
second cheap. So do few escape codes: Textual writes each style from its beginning and resets it,
which costs half as much again, of the processor and of the connection.

One character of a line takes one cell: all glyphs do, and text from outside goes through `clean`.
A run without text is a mark for the mouse: the cells right of it, up to an edge, react to clicks
(see `spot`).
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import cycle, groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stepscope.tui.views.theme import Skin

Run: TypeAlias = tuple[str, str]  # text, style name
Line: TypeAlias = tuple[Run, ...]
# Lines side by side, each with its width in cells; None fills the rest.
Row: TypeAlias = tuple[tuple[Line, int | None], ...]

_MARK = "@"
_EDGE: Run = ("│", "frame")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


def spot(kind: str, value: object) -> Run:
    """Return a run that makes the cells after it clickable; see `spot_of`."""
    return "", f"{_MARK}{kind}:{value}"


NOWHERE = spot("none", "")  # ends a clickable spot


def click(action_id: str, *runs: Run) -> Line:
    return (spot("do", action_id), *runs, NOWHERE)


class Lines(Widget):
    """A widget that shows the lines it is given, cut or filled to its size."""

    DEFAULT_CSS = "Lines { position: absolute; width: 1; height: 1; }"
    ALLOW_SELECT = False

    def __init__(self, skin: Skin, *, id: str) -> None:
        super().__init__(id=id)
        self._skin = skin
        self._rows: list[Row] = []
        self._strips: list[Strip | None] = []  # one for each row; None if not painted yet
        self._width = 0  # the width that all strips were painted for

    def set_skin(self, skin: Skin) -> None:
        self._skin = skin
        self._width = 0
        self.refresh()

    def show(self, lines: Sequence[Line]) -> None:
        self.show_rows([((line, None),) for line in lines])

    def show_rows(self, rows: Sequence[Row]) -> None:
        before, strips = self._rows, self._strips
        changed = [y for y, (old, new) in enumerate(zip(before, rows, strict=False)) if old != new]
        changed += range(min(len(before), len(rows)), max(len(before), len(rows)))
        if not changed:
            return
        self._rows = list(rows)
        self._strips = strips[: len(rows)] + [None] * (len(rows) - len(strips))
        for y in changed:
            if y < len(rows):
                self._strips[y] = None
        width = self.outer_size.width
        self.refresh(*(Region(0, y, width, 1) for y in changed))

    def plain_text(self) -> list[str]:
        """Return the lines as shown, without styles."""
        width, height = self.outer_size
        return [self._strip(y, width).text for y in range(height)]

    def spot_at(self, x: int, y: int) -> tuple[str, str] | None:
        """Return the (kind, value) of the clickable spot at a cell, or None; see `spot`."""
        return spot_of(self._rows[y][0][0], x) if 0 <= y < len(self._rows) else None

    def render_lines(self, crop: Region) -> list[Strip]:
        # This bypasses the styles cache: there is no border, padding or filter to apply.
        width = self.outer_size.width  # `size` is slow, and there is no border
        strips = [self._strip(y, width) for y in crop.line_range]
        if crop.column_span == (0, width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def _strip(self, y: int, width: int) -> Strip:
        if width != self._width:
            self._width = width
            self._strips = [None] * len(self._rows)
        strip = self._strips[y] if y < len(self._strips) else None
        if strip is None:
            colours = COLOR_SYSTEMS[self.app.console.color_system or "truecolor"]
            row = self._rows[y] if y < len(self._rows) else (((), None),)
            strip = LineStrip(row, width, self._skin, colours)
            if y < len(self._strips):
                self._strips[y] = strip
        return strip


def spot_of(line: Line, x: int) -> tuple[str, str] | None:
    """Return the (kind, value) of the clickable spot at cell `x` of a line, or None."""
    found: tuple[str, str] | None = None
    begin = 0
    for text, style in line:
        if begin > x:
            break
        if not text and style.startswith(_MARK):
            kind, _, value = style[1:].partition(":")
            found = kind, value
        elif (text, style) == _EDGE:
            found = None
        begin += len(text)
    return found


class LineStrip(Strip):
    """A strip `width` cells wide, whose output for each run writes only what differs in style."""

    __slots__ = ("_output",)

    def __init__(self, row: Row, width: int, skin: Skin, colours: ColorSystem) -> None:
        segments: list[Segment] = []
        output: list[str] = []
        left = width
        for line, cells in row:
            cells = left if cells is None else cells
            more, text = _painted(line, cells, skin, colours)
            segments += more
            output.append(text)
            left -= cells
        super().__init__(segments, width)
        self._output = "".join(output) + "\x1b[0m"

    def render(self, console: Console) -> str:
        return self._output


@lru_cache(1_024)
def _painted(
    line: Line, width: int, skin: Skin, colours: ColorSystem
) -> tuple[Sequence[Segment], str]:
    segments: list[Segment] = []
    output: list[str] = []
    before = ""
    for text, style in merged_runs(line, width, skin):
        if skin.ascii_only:
            text = skin.text(text, style)
        segments.append(Segment(text, skin.styles[style]))
        output.append(_change(before, style, skin, colours))
        output.append(text)
        before = style
    return segments, "".join(output)


@lru_cache(4_096)
def _change(before: str, style: str, skin: Skin, colours: ColorSystem) -> str:
    """Return the escape sequence from one style to another; `before` is empty if it is unknown."""
    attributes, *shades = _codes(skin.styles[style], colours)
    old = _codes(skin.styles[before], colours) if before else None
    if old is None or old[0] != attributes:
        codes = ["0", attributes, *shades]
    else:
        pairs = zip(shades, old[1:], ("39", "49"), strict=True)
        codes = [shade or default for shade, known, default in pairs if shade != known]
    written = ";".join(filter(None, codes))
    return f"\x1b[{written}m" if written else ""


def _codes(style: Style, colours: ColorSystem) -> tuple[str, str, str]:
    wanted = (("1", style.bold), ("4", style.underline), ("7", style.reverse))
    foreground, background = (
        "" if colour is None else ";".join(colour.downgrade(colours).get_ansi_codes(is_foreground))
        for colour, is_foreground in ((style.color, True), (style.bgcolor, False))
    )
    return ";".join(code for code, is_set in wanted if is_set), foreground, background


def merged_runs(line: Line, width: int, skin: Skin) -> list[Run]:
    """Return `line` in exactly `width` cells and in few runs: each costs a style change."""
    runs: list[Run] = []
    plain = skin.plain_styles
    text, style, left = "", "text", width
    for more, next_style in line:
        if not more:
            continue
        left -= len(more)
        if left < 0:
            more = more[:left]
        if next_style != style and not (next_style in plain and style in plain and more.isspace()):
            if text:
                runs.append((text, style))
            text, style = more, next_style
        else:
            text += more
        if left <= 0:
            break
    if left > 0:
        if style in plain:
            text += " " * left
        else:
            runs.append((text, style))
            text, style = " " * left, "text"
    runs.append((text, style))
    return runs


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


def joined(cells: Iterable[Run]) -> Line:
    """Return a line of these cells, with one run for adjacent ones of the same style."""
    groups = groupby(cells, key=itemgetter(1))
    return tuple(("".join(text for text, _ in group), style) for style, group in groups)


def length_of(line: Iterable[Run]) -> int:
    return sum(len(text) for text, _ in line)


def facts(*parts: str | Run) -> Line:
    """Return a line of labels and values in turns; a part may bring a style of its own."""
    styles = zip(parts, cycle(("muted", "text")), strict=False)
    return tuple((part, style) if isinstance(part, str) else part for part, style in styles)


def bounded(text: str, value: float | None, bound: float | None, rest: str = "") -> Run:
    """Return the text of a latency, marked if it is above its service level, else with `rest`."""
    is_late = value is not None and bound is not None and value > bound
    return (f"{text}!", "breach") if is_late else (text + rest, "text")


def titled(title: str, about: str = "") -> Line:
    return ((title, "title"), (about, "muted"))


class Field(NamedTuple):
    """A part of a line, shown whole or not at all; the highest rank is left out first."""

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
    """Return a line of `width` cells with `left` (cut, if need be) and `right` at its ends."""
    gap = width - length_of(left) - length_of(right)
    if gap < 0:
        return (*fitted(left, max(0, width - length_of(right))), *right)
    return (*left, (fill[0] * gap, fill[1]), *right)


def framed(
    body: Sequence[Line], width: int, height: int, title: Line | str, legend: Line | str = ()
) -> list[Line]:
    """Return `body` in a rounded frame, with a title and, if it fits, a legend in the top edge."""
    if width < 4 or height < 3:
        return [fitted(line, width) for line in body[:height]]
    title = titled(title) if isinstance(title, str) else title
    legend = facts(legend) if isinstance(legend, str) else legend
    inner = width - 2
    head: Line = (("─ ", "frame"), *title, (" ", "frame"))
    tail: Line = ((" ", "frame"), *legend, (" ", "frame")) if length_of(legend) else ()
    if length_of(head) + length_of(tail) + 1 > inner:
        tail = ()
    edge = spread(head, tail, inner, ("─", "frame"))
    lines: list[Line] = [(("╭", "frame"), *edge, ("╮", "frame"))]
    rows = [*body[: height - 2], *[()] * (height - 2 - len(body))]
    lines += [(_EDGE, *fitted(line, inner), _EDGE) for line in rows]
    return [*lines, (("╰" + "─" * inner + "╯", "frame"),)]


def clean(text: str, width: int) -> str:
    """Return text from outside without control and wide characters, at most `width` cells wide."""
    text = _UNPRINTABLE.sub("?", text)
    if not text.isascii():
        text = "".join(char if cell_len(char) == 1 else "?" for char in text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[: max(0, width)]
