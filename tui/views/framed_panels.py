"""Building blocks of all pages but the main one: columns, tables, bars, a selected row.

They are pure functions that know nothing of engines, only the values to show.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.tui.views.lines import Line, Run, clean, fitted, joined, spot
from stepscope.tui.views.theme import LEVELS


class Target(NamedTuple):
    """Where Enter on a row leads: a step, a request, a knob or an engine."""

    step: int | None = None
    request_id: int | None = None
    knob: str | None = None
    engine: str | None = None


class Column(NamedTuple):
    """One column of a table. A column of width 0 fills the rest of the table."""

    name: str
    width: int
    is_right: bool = False


class Rows(NamedTuple):
    """The rows of a long table, made on demand: `make(index)` is called only for visible rows."""

    number: int
    make: Callable[[int], Sequence[Run]]


def beside(*blocks: Sequence[Line]) -> list[Line]:
    """Join blocks of lines side by side; they must be equally high, and their lines full width."""
    return [tuple(run for line in lines for run in line) for lines in zip(*blocks, strict=True)]


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Run]] | Rows,
    width: int,
    height: int,
    selected: int | None = None,
    first_target: int = 0,
    first_row: int = 0,
) -> list[Line]:
    """Return a heading and as many rows as fit, the selected row among them, each `width` wide.

    Columns that do not fit are left out, the last column first. If a row has fewer cells than there
    are columns, its last cell may extend to the end. Each row has a mark by which a mouse click
    finds it.

    Args:
        first_target: index of the first row among the targets (clickable rows) of the page.
        first_row: the first row to show if none is selected and not all fit.
    """
    number_of_rows, row = rows if isinstance(rows, Rows) else (len(rows), rows.__getitem__)
    shown = _fitting(columns, width)
    heading: list[Run] = [(" ", "muted")]
    for column, room in shown:
        heading.append((_cell(column.name, room, column.is_right) + " ", "muted"))
    lines: list[Line] = [tuple(heading)]
    room_for_rows = max(0, height - 1)
    first = first_shown(number_of_rows, room_for_rows, selected)
    if selected is None:
        first = max(0, min(first_row, number_of_rows - room_for_rows))
    for number in range(first, min(number_of_rows, first + room_for_rows)):
        mark = "+cursor" if number == selected else ""
        line: list[Run] = [("▶" if mark else " ", f"text{mark}")]
        cells = row(number)
        for index, ((column, room), (text, style)) in enumerate(zip(shown, cells, strict=False)):
            if index == len(cells) - 1 and len(cells) < len(columns):
                line.append((clean(text, width - sum(len(t) for t, _ in line)), f"{style}{mark}"))
            else:
                line.append((_cell(text, room, column.is_right) + " ", f"{style}{mark}"))
        rest = width - sum(len(text) for text, _ in line)
        line.append((" " * max(0, rest), f"text{mark}"))
        lines.append((spot("row", first_target + number), *fitted(line, width)))
    return lines


def room_of_last(columns: Sequence[Column], width: int) -> int:
    shown = _fitting(columns, width)
    return shown[-1][1] if shown else 0


def first_shown(number: int, room: int, selected: int | None) -> int:
    if selected is None or number <= room:
        return 0
    return max(0, min(selected - room // 2, number - room))


def _fitting(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    left = width - 1
    kept: list[tuple[Column, int]] = []
    for column in columns:
        if left < max(column.width, 8 if not column.width else 1) + 1:
            break
        kept.append((column, column.width))
        left -= column.width + 1
    return [(column, room or max(0, left)) for column, room in kept]


def _cell(text: str, width: int, is_right: bool) -> str:
    text = clean(text, width)
    return text.rjust(width) if is_right else text.ljust(width)


def bar(share: float | None, width: int, style: str) -> Line:
    """Return a horizontal bar, full at 1, lower than a row; blank if the share is unknown."""
    if share is None:
        return ((" " * width, "text"),)
    full = round(max(0.0, min(1.0, share)) * width)
    return (("▇" * full, style), ("·" * (width - full), "idle"))


def cells_by_share(parts: Sequence[float], width: int) -> list[int]:
    """Divide `width` cells in proportion to the parts, by largest remainder; all 0 if they are."""
    amounts = [max(0.0, part) for part in parts]
    total = sum(amounts)
    if not total:
        return [0] * len(amounts)
    exact = [amount / total * width for amount in amounts]
    cells = [int(each) for each in exact]
    by_rest = sorted(range(len(cells)), key=lambda idx: cells[idx] - exact[idx])
    for idx in by_rest[: width - sum(cells)]:
        cells[idx] += 1
    return cells


def column_chart(
    values: Sequence[float | None],
    height: int,
    top: float,
    styles: Sequence[str],
    line: float | None = None,
    *,
    is_down: bool = False,
    full: str = "█",
) -> list[Line]:
    """Return rows of vertical bars, a cell each; a dotted line marks the value `line`.

    Args:
        top: the value that fills a column; a value above 0 is at least a sliver high.
        is_down: let the bars hang from the first row.
    """
    at = -1 if line is None or top <= 0 else max(0, min(height - 1, int(line / top * height)))
    heights = [_eighths(value, top, height) for value in values]
    rows: list[Line] = []
    for y in range(height):
        blank = ("·", "idle") if y == at else (" ", "text")
        cells: list[Run] = []
        for eighths, style in zip(heights, styles, strict=True):
            left = eighths - y * 8
            if left <= 0:
                cells.append(blank)
            elif left >= 8 or (is_down and left >= 7):
                cells.append((full, style))
            elif is_down:
                cells.append(("▔" if left < 3 else "▀", style))
            else:
                cells.append((LEVELS[left - 1], style))
        rows.append(joined(cells))
    return rows if is_down else rows[::-1]


def _eighths(value: float | None, top: float, height: int) -> int:
    if value is None or value <= 0:
        return 0
    return max(1, round(min(1.0, value / top) * height * 8)) if top > 0 else 1


def labelled(label: str, width: int, edge: str = "│") -> tuple[Run, Run]:
    """Return what stands left of a row of a chart, in `width` cells."""
    return (f"{label[: width - 2]:>{width - 2}} ", "muted"), (edge, "frame")


def sparkline(values: Sequence[float | None], width: int, top: float = 0.0) -> str:
    """Return a cell, never full, for the largest value of each slice; blank if none is known.

    `top`: of the scale, if several share it; else the largest value is.
    """
    num = min(width, len(values))
    slices: list[float | None] = []
    for x in range(max(0, num)):
        part = values[x * len(values) // num : (x + 1) * len(values) // num]
        slices.append(max((value for value in part if value is not None), default=None))
    top = top or max((value for value in slices if value is not None), default=0.0)
    return "".join(
        " " if value is None or top <= 0 else LEVELS[min(6, int(value / top * 6.999))]
        for value in slices
    )


def pairs(entries: Sequence[tuple[str, str, str]], width: int) -> list[Line]:
    """Return lines of labels with their values, as many pairs in each line as fit."""
    lines: list[Line] = []
    line: list[Run] = []
    used = 0
    for label, value, style in entries:
        length = len(label) + len(value) + 4
        if line and used + length > width:
            lines.append(tuple(line))
            line, used = [], 0
        line += [(f" {label} ", "muted"), (f"{value}  ", style)]
        used += length
    lines.append(tuple(line))
    return lines
