"""The lanes: a line per request and a column per step show what each request did in each step."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import pairwise

from stepscope.recordings.state.series.lanes import Cell
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, clean, framed, titled
from stepscope.tui.views.panels import inspector
from stepscope.tui.views.theme import LANE_GLYPHS, LANE_STYLES, LATE
from stepscope.tui.views.view import Axis

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
    """Return the panel, `width` x `height` with its frame; names in the `gutter` on its left."""
    glyphs = _glyphs(frame.view.axis, frame.view.zoom > 1, frame.imported is not None)
    edges = _late_edges(frame)
    body: list[Line] = []
    for row in frame.lanes:
        context = "" if row.context is None else _rough(row.context)
        label = _label(row.name, row.status, context, gutter, row.request_id == frame.view.selected)
        body.append((*label, *_cells(_text(row.cells, glyphs, edges), frame.cursor_column)))
    if not body:
        said = inspector.lacks(frame) or [_empty(frame)]
        body = [((" " * gutter, "text"), (text, "muted")) for text in said]
    shown, total = len(frame.lanes), frame.num_lanes
    title = titled("requests × steps", f" ({shown} of {total})" if shown < total else "")
    return framed(body, width, height, title, _legend(frame))


def _late_edges(frame: Frame) -> list[int]:
    """Return the columns at which late tokens begin and end, in turns.

    On the time axis a late step is wide already: there only a step in which all stood still counts.
    """
    by_step = frame.view.axis == "step"
    late = [c is not None and (c.is_slow if by_step else c.is_wide) for c in frame.columns]
    return [x for x, (before, now) in enumerate(pairwise([False, *late])) if before != now]


@cache
def _glyphs(
    axis: Axis, is_merged: bool, of_client: bool
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the glyphs of the cells in a usual column, and those in a late one.

    A column of several steps does not tell chunks apart. A client knows when tokens came, not what
    the engine did for them or in between.
    """
    usual = [("▓" if glyph == "▒" and is_merged else glyph) for glyph in LANE_GLYPHS]
    # "─": the token does not come yet. On the time axis, a late token is at the end of that.
    marked = "━═─" if axis == "step" else "─"
    if of_client:
        usual[Cell.PREFILL] = usual[Cell.PREFILL_ALT] = "━"
        usual[Cell.IDLE], marked = "─", ""
    late = [LATE if glyph in marked else glyph for glyph in usual]
    return dict(enumerate(usual)), dict(enumerate(late))


def _text(cells: bytes, glyphs: tuple[Mapping[int, str], ...], edges: list[int]) -> str:
    raw = cells.decode("latin-1")
    spans = enumerate(pairwise((0, *edges, len(raw))))
    return "".join([raw[begin:end].translate(glyphs[i % 2]) for i, (begin, end) in spans])


def _empty(frame: Frame) -> str:
    if frame.view.filter:
        return f"no request matches {frame.view.filter!r}; {frame.key('filter')} changes the filter"
    if frame.last_step is None:
        return "no step yet: the engine has not run one since this dashboard opened"
    if not frame.tells_requests:
        return "the engine does not report the requests of a step"
    return "no request in these steps"


def _legend(frame: Frame) -> Line:
    state = frame.state
    is_known = state.is_load_known and not frame.is_silent
    waiting = f"{state.num_running} run {state.num_waiting} wait" if is_known else ""
    why = ", ".join(f"{n} {reason}" for reason, n in (state.waiting_reasons or {}).items())
    reasons = f" ({why})" if why else ""
    sort = f"   sort: {frame.view.sort}  filter: {clean(frame.view.filter, 24) or '-'}"
    return ((waiting + reasons, "text"), (sort, "muted"))


@lru_cache(maxsize=1024)
def _label(name: str, status: str, context: str, width: int, selected: bool) -> tuple[Run, ...]:
    mark = "+cursor" if selected else ""
    name = clean(name, width - 7)
    room = width - len(name) - 7
    # A status of four letters needs a blank before the figure.
    text = context if len(context) <= room - (len(status) > 3) else ""
    return (
        (f"{'▶' if selected else ' '}{name} ", f"text{mark}"),
        (f"{status:<4}", f"{_STATUS_STYLES.get(status, 'muted')}{mark}"),
        (f"{text:>{room}} ", f"muted{mark}"),
    )


def _rough(tokens: int) -> str:
    """Return a number in few digits, so that its line is seldom redrawn: `41`, `0.3k`, `4k`."""
    if 100 <= tokens < 999_500:
        return f"{tokens / 1000:.{int(tokens < 950)}f}k"
    return fmt.short(tokens)


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
