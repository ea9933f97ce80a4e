"""The lanes: a line per request and a column per step show what each request did in each step.

`life_line`: one request in time, by causes: what a stretch (a `Piece`) of it went to, such as
"queued". `with_wait`: a list of late tokens, and one of these waits by its causes.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.attribution.causes import WORDS, Cause, Late, Piece, queue_texts
from stepscope.recordings.attribution.front import served_life
from stepscope.recordings.history.lives import Life
from stepscope.recordings.state.lanes import Cell
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.charts.budget_chart import with_cursor
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import pairs
from stepscope.tui.views.lines import Line, Run, clean, facts, framed, joined, length_of, titled
from stepscope.tui.views.panels import inspector
from stepscope.tui.views.theme import CAUSE_GLYPHS, LANE_GLYPHS, LANE_STYLES, LATE
from stepscope.tui.views.view import Axis

_RUNS = re.compile(r"!+|[▓▒]+|✗+|●|○|━+|═+|░+|[·╌─]+|\?+| +")
_STATUS_STYLES = {"PRE": "prefill", "DEC": "decode", "OUT": "caution"}  # of others: muted
LIFE_GUTTER = 9  # cells before the line
_BAR_WIDTH = 10


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the panel, `width` x `height` with its frame; names in the `gutter` on its left."""
    glyphs = _glyphs(frame.view.axis, frame.view.zoom > 1, frame.imported is not None)
    edges = _late_edges(frame)
    body: list[Line] = []
    for row in frame.lanes:
        context = "" if row.context is None else _rough(row.context)
        name, is_selected = request_name(row.request_id), row.request_id == frame.view.selected
        label = _label(name, row.status, context, gutter, is_selected)
        cells = _cells(row.cells, glyphs, edges)
        body.append((*label, *with_cursor(cells, frame.cursor_column)))
    if not body:
        said = inspector.lacks(frame) or [_empty(frame)]
        body = [((" " * gutter, "text"), (text, "muted")) for text in said]
    shown, total = len(frame.lanes), frame.num_lanes
    title = titled("requests × steps", f" ({shown} of {total})" if shown < total else "")
    return framed(body, width, height, title, _legend(frame, width - 8 - length_of(title)))


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


def _cells(cells: bytes, glyphs: tuple[Mapping[int, str], ...], edges: list[int]) -> Line:
    raw = cells.decode("latin-1")
    spans = enumerate(pairwise((0, *edges, len(raw))))
    text = "".join([raw[begin:end].translate(glyphs[i % 2]) for i, (begin, end) in spans])
    return tuple([(run, LANE_STYLES[run[0]]) for run in _RUNS.findall(text)])


def _empty(frame: Frame) -> str:
    if frame.view.filter:
        return f"no request matches {frame.view.filter!r}; {frame.key('filter')} changes the filter"
    if frame.last_step is None:
        return "no step yet: the engine has run none since it is watched"
    if not frame.tells_requests:
        return "the engine does not report the requests of a step"
    return "no request in these steps"


def _legend(frame: Frame, room: int) -> Line:
    state = frame.state
    is_known = state.is_load_known and not frame.is_silent
    waiting = f"{state.num_running} run {state.num_waiting} wait" if is_known else ""
    why = f" ({', '.join(queue_texts(state.waiting_reasons))})" if state.waiting_reasons else ""
    sort = f"   sort: {frame.view.sort}  filter: {clean(frame.view.filter, 24) or '-'}"
    has_room = len(waiting + why + sort) <= room
    return ((waiting + why if has_room else waiting, "text"), (sort, "muted"))


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


def life_line(
    frame: Frame, view: RequestView, life: Life | None, width: int, height: int
) -> list[Line]:
    """Return the time line of a request, and below it the time that each cause took."""
    pieces = _pieces(frame, view, life)
    if not pieces:
        return [((" none of its steps is in memory", "muted"),)]
    extent_ns = pieces[-1].start_ns + pieces[-1].ns - pieces[0].start_ns
    cells = _life_cells(pieces, max(10, width - LIFE_GUTTER - 10))
    took = f" {fmt.with_ms(extent_ns / 1e6)}"
    line: Line = ((f" {'life':<{LIFE_GUTTER - 1}}", "muted"), *cells, (took, "text"))
    totals: Counter[Cause] = Counter()
    for piece in pieces:
        totals[piece.cause] += piece.ns
    total = max(1, sum(totals.values()))
    entries = []
    for cause, ns in totals.most_common():
        label = f"{CAUSE_GLYPHS[cause][0]} {WORDS[cause].label}"
        entries.append((label, f"{ns / total:.0%} {fmt.with_ms(ns / 1e6)}", "text"))
    spent = pairs(entries, width - LIFE_GUTTER)[: max(0, height - 1)]
    heads = [f" {'went to':<{LIFE_GUTTER - 1}}", *[" " * LIFE_GUTTER] * len(spent)]
    return [line, *(((head, "muted"), *each) for head, each in zip(heads, spent, strict=False))]


def _pieces(frame: Frame, view: RequestView, life: Life | None) -> list[Piece]:
    """Return the pieces up to the cursor; a wait is "queued" or "preempted" until its token."""
    if life is None:
        return []
    now_ns = frame.state.time_ns
    pieces = [piece for piece in life.pieces if piece.start_ns < now_ns]
    if view.status in ("waiting", "preempted"):
        begin_ns = view.arrival_ns
        if pieces:
            begin_ns = pieces[-1].start_ns + pieces[-1].ns
        if begin_ns < now_ns and not (view.is_partial and not pieces):
            cause: Cause = "queued" if view.status == "waiting" else "preempted"
            pieces.append(Piece(cause, begin_ns, now_ns - begin_ns, frame.cursor or 0))
    return served_life(pieces, view)


def _life_cells(pieces: Sequence[Piece], width: int) -> Line:
    """Return the time line; a cell shows its worst cause, the last in `CAUSE_GLYPHS`."""
    rank = {cause: number for number, cause in enumerate(CAUSE_GLYPHS)}
    cells, begin_ns = [-1] * width, pieces[0].start_ns
    extent = max(1, pieces[-1].start_ns + pieces[-1].ns - begin_ns)
    for piece in pieces:
        first = (piece.start_ns - begin_ns) * width // extent
        last = (piece.start_ns + piece.ns - 1 - begin_ns) * width // extent
        for x in range(max(0, first), min(width, last + 1)):
            cells[x] = max(cells[x], rank[piece.cause])
    glyphs = list(CAUSE_GLYPHS.values())
    return joined((" ", "text") if cell < 0 else glyphs[cell] for cell in cells)


def with_wait(
    draw_list: Callable[[int], list[Line]], late: Late | None, width: int, height: int
) -> list[Line]:
    """Return a list of late tokens, drawn in a given height; below it why the selected was `late`.

    Beside a list of less than six lines, or without a wait, the list has all of the height.
    """
    if late is None or height < 10:
        return draw_list(height)
    wait_height = min(len(late.pieces) + 2, height - 6)
    return [*draw_list(height - wait_height), *_wait(late, width, wait_height)]


def _wait(late: Late, width: int, height: int) -> list[Line]:
    """Return the panel with its frame; its last line sums up the pieces that do not fit."""
    room = height - 2
    num = len(late.pieces) if len(late.pieces) <= room else room - 1
    body = [_line(late, piece, width - 2) for piece in late.pieces[:num]]
    if rest := late.pieces[num:]:
        body.append(facts(f" {sum(each.ns for each in rest) / 1e6:>10,.1f} ms in {len(rest)} more"))
    what = "first token" if not late.token_idx else f"token #{late.token_idx + 1}"
    title = f"{what} of {request_name(late.request_id)}: {late.gap_ns / 1e6:,.1f} ms"
    pause = "‖ the operator's pause, which breaks no service level" if late.is_excused else ""
    return framed(body, width, height, titled(title, "  in order of time"), ((pause, "mark"),))


def _line(late: Late, piece: Piece, width: int) -> Line:
    glyph, style = CAUSE_GLYPHS[piece.cause]
    share = piece.ns / max(1, late.gap_ns)
    cells = max(1, round(share * _BAR_WIDTH))
    where = f" from step {piece.step:,}" if piece.num_steps else f" before step {piece.step:,}"
    room = max(8, width - 23 - _BAR_WIDTH)
    text = clean(late_text.of_piece(piece, room), room)
    where = where if len(text) + len(where) <= room else ""
    bar_style = "text" if style in ("preempted", "idle") else style
    return (
        (f" {piece.ns / 1e6:>10,.1f} ms {share:>4.0%} ", "strong" if share >= 0.5 else "text"),
        (glyph, style),
        (" ", "text"),
        ("▇" * cells + " " * (_BAR_WIDTH - cells + 1), bar_style),
        (text, "text"),
        (where, "muted"),
    )
