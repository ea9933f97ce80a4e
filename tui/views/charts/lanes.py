"""The lanes: a line per request and a column per step show what each request did in each step."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from stepscope.recordings.state.series.lanes import Cell
from stepscope.tui.views import format as fmt
from stepscope.tui.views import totals_text
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.lane_rows import LaneRow
from stepscope.tui.views.lines import Line, Run, clean, framed
from stepscope.tui.views.theme import LANE_GLYPHS, LANE_STYLES, LATE

MAX_LABEL = 20
_TO_GLYPHS = dict(enumerate(LANE_GLYPHS))
# A client knows when tokens came, not what the engine did for them or in between.
_CLIENTS = {Cell.PREFILL: "━", Cell.PREFILL_ALT: "━", Cell.IDLE: "─"}
_MERGED_TO_GLYPHS = _TO_GLYPHS | {cell: "▓" for cell, glyph in _TO_GLYPHS.items() if glyph == "▒"}
_TOKENS = {ord(glyph): LATE for glyph in "━═"}
_STILL = {ord("─"): LATE}  # its token does not come
_RUNS = re.compile(r"!+|[▓▒]+|✗+|●|○|━+|═+|░+|[·╌─]+|\?+| +")
_STATUS_STYLES = {
    "WAIT": "muted",
    "PRE": "prefill",
    "DEC": "decode",
    "OUT": "caution",
    "END": "muted",
    "ABRT": "muted",
}


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the lines of the panel, `width` x `height` cells including its frame.

    Args:
        gutter: cells left of the columns, for the request's name and status.
    """
    glyphs = _TO_GLYPHS if frame.view.zoom == 1 else _MERGED_TO_GLYPHS
    if frame.imported is not None:
        glyphs = glyphs | _CLIENTS
    late = _late_columns(frame)
    body = [
        (
            *_label(row, gutter, row.request_id == frame.view.selected),
            *_cells(_late(row, glyphs, late), frame.cursor_column),
        )
        for row in frame.lanes
    ]
    if not body:
        said = totals_text.lines(frame) or [_empty(frame)]
        body = [((" " * gutter, "text"), (text, "muted")) for text in said]
    title: Line = (("requests × steps", "title"), (_extent(frame), "muted"))
    return framed(body, width, height, title, _legend(frame))


def _late_columns(frame: Frame) -> list[tuple[int, dict[int, str]]]:
    """Return the columns with late tokens, and how to mark those in a lane.

    On the time axis a late step is wide already: there only a step in which all stood still counts.
    """
    by_step = frame.view.axis == "step"
    return [
        (x, _TOKENS | _STILL if by_step else _STILL)
        for x, column in enumerate(frame.columns)
        if column is not None and (column.is_slow if by_step else column.is_wide)
    ]


def _late(row: LaneRow, glyphs: Mapping[int, str], late: list[tuple[int, dict[int, str]]]) -> str:
    """Return the cells of a lane; tokens that came late because their step took long are marked."""
    text = row.cells.decode("latin-1").translate(glyphs)
    if not late:
        return text
    cells = list(text)
    for x, marks in late:
        if x < len(cells):
            cells[x] = cells[x].translate(marks)
    return "".join(cells)


def label_width(rows: Iterable[LaneRow], least: int) -> int:
    """Return the width of the labels left of the columns, from `least` to `MAX_LABEL` cells.

    A label is a request's name, status and context size. Context sizes count in their shortest
    form, so that the columns seldom move.
    """
    wide = least
    for row in rows:
        size = "" if row.context is None else _rougher(row.context)
        # A status of three letters leaves a blank in its four cells. Most sizes take two cells.
        needed = 8 + len(row.name) + max(2, len(size)) - (len(row.status) <= 3)
        wide = max(wide, needed)
    return min(wide, MAX_LABEL)


def _empty(frame: Frame) -> str:
    if frame.view.filter:
        return f"no request matches {frame.view.filter!r}; {frame.key('filter')} changes the filter"
    if frame.last_step is None:
        return "no step yet: the engine has not run one since this dashboard opened"
    if not frame.tells_requests:
        return "the engine does not report the requests of a step"
    return "no request in these steps"


def _extent(frame: Frame) -> str:
    """Return a text like " (12 of 80)": how many lanes are shown; empty if all are."""
    shown, total = len(frame.lanes), frame.num_lanes
    return f" ({shown} of {total})" if shown < total else ""


def _legend(frame: Frame) -> Line:
    state = frame.state
    waiting = f"{state.num_running} run {state.num_waiting} wait" if state.is_load_known else ""
    reasons = ""
    if state.waiting_reasons:
        reasons = " (" + ", ".join(f"{n} {why}" for why, n in state.waiting_reasons.items()) + ")"
    sort = f"   sort: {frame.view.sort}  filter: {clean(frame.view.filter, 24) or '-'}"
    return ((waiting + reasons, "text"), (sort, "muted"))


def _label(row: LaneRow, width: int, selected: bool) -> tuple[Run, ...]:
    context = () if row.context is None else (_rough(row.context), _rougher(row.context))
    return _label_runs(row.name, row.status, context, width, selected)


@lru_cache(maxsize=1024)
def _label_runs(
    name: str, status: str, context: tuple[str, ...], width: int, selected: bool
) -> tuple[Run, ...]:
    """Return the label of a lane in `width` cells: name, status, and tokens in the KV cache.

    Args:
        context: the number of tokens in several forms, the shortest last; if none fits, the label
            goes without it.
    """
    mark = "+cursor" if selected else ""
    name = clean(name, width - 7)
    room = width - len(name) - 7
    # A status of four letters needs a blank before the figure.
    room_for = room - (len(status) > 3)
    text = next((each for each in context if len(each) <= room_for), "")
    return (
        (f"{'▶' if selected else ' '}{name} ", f"text{mark}"),
        (f"{status:<4}", f"{_STATUS_STYLES.get(status, 'muted')}{mark}"),
        (f"{text:>{room}} ", f"muted{mark}"),
    )


def _rough(tokens: int) -> str:
    """Return a number rounded to two digits.

    Two digits suffice, and a line whose text has not changed need not be redrawn.
    """
    return f"{tokens / 1000:.1f}k" if 100 <= tokens < 9950 else fmt.short(tokens)


def _rougher(tokens: int) -> str:
    """Return a number in a shorter form, for use beside a long name: `4k`, `0.3k`."""
    if tokens < 950 or tokens >= 999_500:
        return _rough(tokens)
    return f"{tokens / 1000:.0f}k"


def _cells(text: str, cursor_column: int | None) -> Line:
    if cursor_column is None:
        return _split(text)
    under = text[cursor_column : cursor_column + 1]
    return (
        *_split(text[:cursor_column]),
        (under, f"{LANE_STYLES.get(under, 'text')}+cursor"),
        *_split(text[cursor_column + 1 :]),
    )


def _split(text: str) -> Line:
    return tuple([(run, LANE_STYLES[run[0]]) for run in _RUNS.findall(text)])
