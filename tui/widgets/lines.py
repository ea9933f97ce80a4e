"""Lines of styled runs, and the one widget that shows them.

A view (`budget_chart.draw`, `lanes.draw`, ...) is a pure function from a `Frame` to lines; the
widget turns a line into a `Strip` once, keeps it for as long as the line stays the same, and
refreshes only lines that changed. That is what makes ten frames a second cheap.

In a line one character is one cell: the glyphs are, and text from outside goes through `clean`.
A run without text is a mark: what is right of it, up to an edge, leads somewhere (`spot`).
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stepscope.tui.theme import Skin

Run: TypeAlias = tuple[str, str]  # text, style name
Line: TypeAlias = tuple[Run, ...]

_MARK = "@"
_EDGE: Run = ("│", "frame")
_MAX_PAINTED = 512
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


def spot(kind: str, value: object) -> Run:
    """A mark for the mouse; `Lines.spot_at` finds it again as (kind, value)."""
    return "", f"{_MARK}{kind}:{value}"


class LineStrip(Strip):
    """A strip whose runs write what differs from the run before, not their whole style again."""

    def render(self, console: Console) -> str:
        if self._render_cache is None:
            color_system = console._color_system or ColorSystem.TRUECOLOR
            parts: list[str] = []
            before: _Codes | None = None
            for text, style, _ in self._segments:
                codes = _codes(style, color_system) if style is not None else _PLAIN
                parts.append(codes.after(before))
                parts.append(text)
                before = codes
            parts.append("\x1b[0m")
            self._render_cache = "".join(parts)
        return self._render_cache

    def crop(self, start: int, end: int | None = None) -> Strip:
        # The compositor asks for nothing at all of the neighbour of every changed line.
        return _NOTHING if end == 0 else super().crop(start, end)


_NOTHING = Strip([], 0)


class _Codes(NamedTuple):
    """A style as parameters of an SGR sequence."""

    attributes: str
    foreground: str
    background: str

    def after(self, before: "_Codes | None") -> str:
        """What to write to get here from the style of the run before."""
        if before is None or before.attributes != self.attributes:
            codes = [code for code in ("0", *self) if code]
        else:
            codes = []
            if self.foreground != before.foreground:
                codes.append(self.foreground or "39")
            if self.background != before.background:
                codes.append(self.background or "49")
        return f"\x1b[{';'.join(codes)}m" if codes else ""


_PLAIN = _Codes("", "", "")


@lru_cache(maxsize=1024)
def _codes(style: Style, color_system: ColorSystem) -> _Codes:
    attributes = [
        code
        for code, is_set in (
            ("1", style.bold),
            ("4", style.underline),
            ("7", style.reverse),
        )
        if is_set
    ]
    foreground = background = ""
    if style.color is not None:
        foreground = ";".join(style.color.downgrade(color_system).get_ansi_codes())
    if style.bgcolor is not None:
        background = ";".join(style.bgcolor.downgrade(color_system).get_ansi_codes(False))
    return _Codes(";".join(attributes), foreground, background)


class Lines(Widget):
    """Shows lines that somebody else computed, cut or filled to its size."""

    DEFAULT_CSS = "Lines { position: absolute; width: 1; height: 1; }"
    ALLOW_SELECT = False

    def __init__(self, skin: Skin, *, id: str) -> None:
        super().__init__(id=id)
        self._skin = skin
        self._lines: list[Line] = []
        self._strips: list[Strip | None] = []  # of the lines, None where not painted yet
        self._painted: dict[Line, Strip] = {}
        self._width = 0  # that all of these are for

    @property
    def skin(self) -> Skin:
        return self._skin

    @skin.setter
    def skin(self, skin: Skin) -> None:
        self._skin = skin
        self._forget()
        self.refresh()

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the content; only lines that differ are drawn again."""
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
        self.refresh(*_bands(changed, self.outer_size.width))

    def plain_text(self) -> list[str]:
        """What is shown, without styles."""
        width, height = self.outer_size
        return [self._strip(y, width).text for y in range(height)]

    def content(self, y: int) -> Line:
        """One of the lines that were given."""
        return self._lines[y] if 0 <= y < len(self._lines) else ()

    def spot_at(self, x: int, y: int) -> tuple[str, str] | None:
        """The mark that a cell belongs to; see `spot`."""
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
        # Not through the styles cache: there is no border, padding or filter to apply here, and
        # the compositor caches what it derives from a strip on that strip.
        width = self.outer_size.width  # `size` is dear, and there is no border
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
            strip = self._painted[line] = LineStrip(_segments(line, width, self._skin), width)
        return strip


def _segments(line: Line, width: int, skin: Skin) -> list[Segment]:
    """As few as possible, for each costs a colour change on the wire: blanks join what is before
    them where nothing shows the difference."""
    segments: list[Segment] = []
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
                segments.append(Segment(skin.text(text, style), skin.style(style)))
            text, style = more, next_style
        else:
            text += more
        if left <= 0:
            break
    if left > 0:
        if style in plain:
            text += " " * left
        else:
            segments.append(Segment(skin.text(text, style), skin.style(style)))
            text, style = " " * left, "text"
    segments.append(Segment(skin.text(text, style), skin.style(style)))
    return segments


def _bands(rows: Sequence[int], width: int) -> list[Region]:
    """Regions of full width that cover `rows`, which are in order; one for neighbours."""
    bands: list[Region] = []
    for y in rows:
        if bands and bands[-1].bottom == y:
            bands[-1] = Region(0, bands[-1].y, width, bands[-1].height + 1)
        else:
            bands.append(Region(0, y, width, 1))
    return bands


def fitted(line: Iterable[Run], width: int) -> Line:
    """`line` cut or filled with blanks to `width` cells."""
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
