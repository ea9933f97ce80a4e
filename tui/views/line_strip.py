"""`LineStrip`: a line of styled runs as a `Strip` for Textual, written with few escape codes.

Charts move by a column with each step, so most lines are written to the terminal once and never
again. Textual writes every style from its beginning and resets it; at ten frames a second that
costs half as much again, of the processor and of the connection.
"""

from functools import lru_cache
from typing import TypeAlias

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from stepscope.tui.views.theme import Skin

Run: TypeAlias = tuple[str, str]  # text, style name
Line: TypeAlias = tuple[Run, ...]


class LineStrip(Strip):
    """A strip whose output, for each run, only writes what differs from the previous run's style.

    Args:
        width: width in cells; the line is cut or filled to it.
    """

    def __init__(self, line: Line, width: int, skin: Skin) -> None:
        runs = merged_runs(line, width, skin)
        segments = [Segment(skin.text(text, style), skin.style(style)) for text, style in runs]
        super().__init__(segments, width)

    def render(self, console: Console) -> str:
        colours = COLOR_SYSTEMS[console.color_system or "truecolor"]
        parts: list[str] = []
        before: Style | None = None
        for text, style, _ in self:
            parts.append(_change(before, style or Style(), colours))
            parts.append(text)
            before = style
        parts.append("\x1b[0m")
        return "".join(parts)


@lru_cache(4_096)
def _change(before: Style | None, style: Style, colours: ColorSystem) -> str:
    """Return the escape sequence that switches from one style to another.

    Args:
        before: None if the style before is unknown.
    """
    attributes, *shades = _codes(style, colours)
    if before is None or (old := _codes(before, colours))[0] != attributes:
        codes = ["0", attributes, *shades]
    else:
        pairs = zip(shades, old[1:], ("39", "49"), strict=True)
        codes = [shade or default for shade, known, default in pairs if shade != known]
    written = ";".join(filter(None, codes))
    return f"\x1b[{written}m" if written else ""


def _codes(style: Style, colours: ColorSystem) -> tuple[str, str, str]:
    """Return attributes, foreground and background as parameters of an SGR escape sequence."""
    wanted = (("1", style.bold), ("4", style.underline), ("7", style.reverse))
    foreground, background = (
        "" if colour is None else ";".join(colour.downgrade(colours).get_ansi_codes(is_foreground))
        for colour, is_foreground in ((style.color, True), (style.bgcolor, False))
    )
    return ";".join(code for code, is_set in wanted if is_set), foreground, background


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
