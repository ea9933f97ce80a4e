"""`LineStrip`: a line of styled runs as a `Strip` for Textual, written with few escape codes.

Most lines are written to the terminal once and never again, because charts move by a column with
each step. So a `LineStrip` makes the terminal output directly from the runs. It makes the segments
that Textual's own methods need only when Textual reads them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from stepscope.tui.views.theme import Skin

Run: TypeAlias = tuple[str, str]  # text, style name
Line: TypeAlias = tuple[Run, ...]


class Painter:
    """Turns lines into strips with the styles of one `Skin`.

    It caches the escape codes that switch between any two styles.
    """

    def __init__(self, skin: Skin) -> None:
        self.skin = skin
        self._color_system = ColorSystem.TRUECOLOR
        self._codes: dict[str, _Codes] = {}
        self._changes: dict[tuple[str, str], str] = {}

    def strip(self, line: Line, width: int) -> "LineStrip":
        return LineStrip(line, width, self)

    def written(self, line: Line, width: int, color_system: ColorSystem) -> str:
        """Return the terminal output for a line.

        It assumes that no style is set before the first cell.
        """
        if color_system is not self._color_system:
            self._color_system = color_system
            self._codes, self._changes = {}, {}
        changes, skin = self._changes, self.skin
        parts: list[str] = []
        before = ""
        for text, style in merged_runs(line, width, skin):
            change = changes.get((before, style))
            if change is None:
                change = changes[before, style] = self._change(before, style)
            parts.append(change)
            parts.append(skin.text(text, style) if skin.ascii_only else text)
            before = style
        parts.append("\x1b[0m")
        return "".join(parts)

    def _change(self, before: str, style: str) -> str:
        return self._codes_of(style).after(self._codes_of(before) if before else None)

    def _codes_of(self, style: str) -> "_Codes":
        codes = self._codes.get(style)
        if codes is None:
            codes = self._codes[style] = _codes(self.skin.style(style), self._color_system)
        return codes


class LineStrip(Strip):
    """A strip whose output, for each run, only writes what differs from the previous run's style.

    Args:
        width: width in cells; the line is cut or filled to it.
    """

    __slots__ = ("_line", "_made", "_painter")

    def __init__(self, line: Line, width: int, painter: Painter) -> None:
        # `Strip.__init__` is not called: it would make a cache for each of its methods.
        self._line = line
        self._painter = painter
        self._made: list[Segment] | None = None
        self._cell_length = width
        self._render_cache: str | None = None
        self._link_ids: set[str] | None = None
        self._cell_count: int | None = None
        self._divide_cache = self._crop_cache = self._style_cache = _FORGETFUL
        self._filter_cache = self._line_length_cache = self._crop_extend_cache = _FORGETFUL
        self._offsets_cache = _FORGETFUL

    @property
    def _segments(self) -> list[Segment]:  # type: ignore[override]
        made = self._made
        if made is None:
            skin = self._painter.skin
            made = self._made = [
                Segment(skin.text(text, style), skin.style(style))
                for text, style in merged_runs(self._line, self._cell_length or 0, skin)
            ]
        return made

    def render(self, console: Console) -> str:
        if self._render_cache is None:
            color_system = console._color_system or ColorSystem.TRUECOLOR
            self._render_cache = self._painter.written(
                self._line, self._cell_length or 0, color_system
            )
        return self._render_cache

    def crop(self, start: int, end: int | None = None) -> Strip:
        # The compositor asks for an empty part of the neighbour of every changed line.
        return _NOTHING if end == 0 else super().crop(start, end)

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        cuts = list(cuts)
        return [self] if cuts == [self._cell_length] else super().divide(cuts)


class _Forgetful:
    """A cache that stores nothing; it replaces a cache whose entries would never be read again."""

    def get(self, key: object, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: object, value: object) -> None:
        return


_FORGETFUL: Any = _Forgetful()
_NOTHING = Strip([], 0)


class _Codes(NamedTuple):
    """A style as the parameters of an SGR escape sequence."""

    attributes: str
    foreground: str
    background: str

    def after(self, before: "_Codes | None") -> str:
        """Return the escape sequence that switches from style `before` to this style.

        None as `before` means that the style before is unknown.
        """
        if before is None or before.attributes != self.attributes:
            codes = [code for code in ("0", *self) if code]
        else:
            codes = []
            if self.foreground != before.foreground:
                codes.append(self.foreground or "39")
            if self.background != before.background:
                codes.append(self.background or "49")
        return f"\x1b[{';'.join(codes)}m" if codes else ""


def _codes(style: Style, color_system: ColorSystem) -> _Codes:
    attributes = [
        code
        for code, is_set in (("1", style.bold), ("4", style.underline), ("7", style.reverse))
        if is_set
    ]
    foreground = background = ""
    if style.color is not None:
        foreground = ";".join(style.color.downgrade(color_system).get_ansi_codes())
    if style.bgcolor is not None:
        background = ";".join(style.bgcolor.downgrade(color_system).get_ansi_codes(False))
    return _Codes(";".join(attributes), foreground, background)


def merged_runs(line: Line, width: int, skin: Skin) -> list[Run]:
    """Return `line` in exactly `width` cells and in as few runs as possible.

    Each run costs a style change in the output. So blanks take the style of the run before them,
    where that looks the same.
    """
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
