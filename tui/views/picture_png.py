"""Draws a screen of characters as a PNG image, the same on every machine.

Needs Pillow and matplotlib. matplotlib includes the font (DejaVu Sans Mono), so the system needs no
font. Lines, blocks and shades are not taken from the font but drawn to the edges of their cells, as
terminals do: otherwise gaps would show between cells.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.color import Color
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME

from stepscope.recordings.export.output import missing
from stepscope.tui.views.theme import LEVELS

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_CELL_WIDTH, _CELL_HEIGHT = 12, 24  # pixels
_FONT_SIZE = 20  # makes a character one cell wide
_PADDING = 12  # around the screen
_THIN, _HEAVY = 2, 4  # strokes

_Colour: TypeAlias = tuple[int, int, int]
_Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom; 0..1 of a cell

# Strokes from the middle of a cell to its left, right, upper and lower side: 1 is thin, 2 heavy.
_STROKES = {
    "─": (1, 1, 0, 0), "│": (0, 0, 1, 1), "┤": (1, 0, 1, 1), "├": (0, 1, 1, 1),
    "┬": (1, 1, 0, 1), "┴": (1, 1, 1, 0), "┼": (1, 1, 1, 1), "╭": (0, 1, 0, 1),
    "╮": (1, 0, 0, 1), "╰": (0, 1, 1, 0), "╯": (1, 0, 1, 0), "━": (2, 2, 0, 0),
}  # fmt: skip
# Which of the four dots of each 2x2 square are set; they are numbered row by row.
_SHADES = {"░": (0,), "▒": (0, 3), "▓": (0, 1, 3)}
_DOT = 2
_PARTS: dict[str, tuple[_Box, ...]] = {
    "▌": ((0.0, 0.0, 0.5, 1.0),),
    "▐": ((0.5, 0.0, 1.0, 1.0),),
    "▀": ((0.0, 0.0, 1.0, 0.5),),
    "▚": ((0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)),
}


def check_installed() -> None:
    """Raise MissingPackage if Pillow or matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401 - only to see whether it can be imported
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing("matplotlib", "a PNG") from error


def png(rows: "Sequence[Sequence[tuple[str, Style]]]") -> bytes:
    """Return a PNG image of a screen.

    Args:
        rows: the lines of the screen, each a sequence of runs of characters with a style.

    Raises:
        MissingPackage: Pillow or matplotlib is not installed.
    """
    try:
        import matplotlib
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise missing("matplotlib", "a PNG") from error
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    plain = ImageFont.truetype(fonts / "DejaVuSansMono.ttf", _FONT_SIZE)
    bold = ImageFont.truetype(fonts / "DejaVuSansMono-Bold.ttf", _FONT_SIZE)

    num_columns = max((sum(len(run) for run, _ in row) for row in rows), default=0)
    ground = _ground(rows)
    image = Image.new(
        "RGB",
        (num_columns * _CELL_WIDTH + 2 * _PADDING, len(rows) * _CELL_HEIGHT + 2 * _PADDING),
        ground,
    )
    draw = ImageDraw.Draw(image)
    for row_idx, row in enumerate(rows):
        x, y = _PADDING, _PADDING + row_idx * _CELL_HEIGHT
        for run, style in row:
            ink, paper = _colours(style, ground)
            begin, end = x, x + len(run) * _CELL_WIDTH
            draw.rectangle((begin, y, end - 1, y + _CELL_HEIGHT - 1), paper)
            for character in run:
                if character != " " and not _draw_shape(draw, character, x, y, ink):
                    font = bold if style.bold else plain
                    draw.text((x, y + _CELL_HEIGHT - 6), character, ink, font, anchor="ls")
                x += _CELL_WIDTH
            if style.underline:
                draw.rectangle((begin, y + 21, end - 1, y + 22), ink)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _ground(rows: "Sequence[Sequence[tuple[str, Style]]]") -> _Colour:
    """Return the most frequent background colour, to fill the space around the screen."""
    counts: dict[_Colour, int] = {}
    for row in rows:
        for run, style in row:
            paper = _colours(style, None)[1]
            counts[paper] = counts.get(paper, 0) + len(run)
    return max(counts, key=counts.__getitem__, default=_rgb(None, is_ink=False))


def _colours(style: Style, ground: _Colour | None) -> tuple[_Colour, _Colour]:
    ink = _rgb(style.color, is_ink=True)
    paper = _rgb(style.bgcolor, is_ink=False)
    if style.bgcolor is None and ground is not None:
        paper = ground
    if style.dim:
        ink = _mixed(ink, paper, 0.6)
    return (paper, ink) if style.reverse else (ink, paper)


def _rgb(colour: Color | None, *, is_ink: bool) -> _Colour:
    found = (colour or Color.default()).get_truecolor(SVG_EXPORT_THEME, foreground=is_ink)
    return found.red, found.green, found.blue


def _mixed(ink: _Colour, paper: _Colour, share: float) -> _Colour:
    red, green, blue = (round(share * a + (1 - share) * b) for a, b in zip(ink, paper, strict=True))
    return red, green, blue


def _draw_shape(draw: "ImageDraw", character: str, x: int, y: int, ink: _Colour) -> bool:
    """Draw a line, block or shade into its cell; return False for any other character."""

    def fill(box: _Box) -> None:
        left, top, right, bottom = box
        draw.rectangle(
            (
                x + round(left * _CELL_WIDTH),
                y + round(top * _CELL_HEIGHT),
                x + round(right * _CELL_WIDTH) - 1,
                y + round(bottom * _CELL_HEIGHT) - 1,
            ),
            ink,
        )

    if character in _SHADES:
        for top in range(y, y + _CELL_HEIGHT, 2 * _DOT):
            for left in range(x, x + _CELL_WIDTH, 2 * _DOT):
                for place in _SHADES[character]:
                    dot_x, dot_y = left + place % 2 * _DOT, top + place // 2 * _DOT
                    draw.rectangle((dot_x, dot_y, dot_x + _DOT - 1, dot_y + _DOT - 1), ink)
    elif character in LEVELS:
        fill((0, 1 - (LEVELS.index(character) + 1) / 8, 1, 1))
    elif character in _PARTS:
        for box in _PARTS[character]:
            fill(box)
    elif character in _STROKES:
        _strokes(draw, _STROKES[character], x, y, ink)
    elif character in "═╌┄":
        _parted_line(draw, character, x, y, ink)
    else:
        return False
    return True


def _strokes(
    draw: "ImageDraw", sides: tuple[int, int, int, int], x: int, y: int, ink: _Colour
) -> None:
    left, right, up, down = sides
    middle_x, middle_y = x + _CELL_WIDTH // 2, y + _CELL_HEIGHT // 2
    half = (_HEAVY if 2 in sides else _THIN) // 2
    if left or right:
        start = x if left else middle_x - half
        end = x + _CELL_WIDTH if right else middle_x + half
        draw.rectangle((start, middle_y - half, end - 1, middle_y + half - 1), ink)
    if up or down:
        start = y if up else middle_y - half
        end = y + _CELL_HEIGHT if down else middle_y + half
        draw.rectangle((middle_x - half, start, middle_x + half - 1, end - 1), ink)


def _parted_line(draw: "ImageDraw", character: str, x: int, y: int, ink: _Colour) -> None:
    """Draw a double or a dashed line."""
    middle = y + _CELL_HEIGHT // 2
    if character == "═":
        for top in (middle - 4, middle + 2):
            draw.rectangle((x, top, x + _CELL_WIDTH - 1, top + _THIN - 1), ink)
        return
    num_dashes = 2 if character == "╌" else 3
    width = _CELL_WIDTH // num_dashes
    for dash in range(num_dashes):
        start = x + dash * width + 1
        draw.rectangle((start, middle - 1, start + width - 3, middle), ink)
