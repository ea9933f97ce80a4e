"""A request, or one of its waits, in time: which causes took it, and how much each.

A cause says what a stretch of time went to, such as "queued" or "preempted". A `Piece` is such a
stretch with its cause.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.attribution.causes import WORDS, Cause, Late, Piece
from stepscope.recordings.attribution.front import served_life
from stepscope.recordings.history.lives import Life
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import pairs
from stepscope.tui.views.lines import Line, clean, facts, framed, joined, titled
from stepscope.tui.views.theme import CAUSE_GLYPHS

GUTTER = 9  # cells before the line


def draw(frame: Frame, view: RequestView, life: Life | None, width: int, height: int) -> list[Line]:
    """Return the time line of a request, and below it the time that each cause took."""
    pieces = _pieces(frame, view, life)
    if not pieces:
        return [((" none of its steps is in memory", "muted"),)]
    extent_ns = pieces[-1].start_ns + pieces[-1].ns - pieces[0].start_ns
    cells, took = _cells(pieces, max(10, width - GUTTER - 10)), f" {fmt.with_ms(extent_ns / 1e6)}"
    line: Line = ((f" {'life':<{GUTTER - 1}}", "muted"), *cells, (took, "text"))
    totals: Counter[Cause] = Counter()
    for piece in pieces:
        totals[piece.cause] += piece.ns
    total = max(1, sum(totals.values()))
    entries = []
    for cause, ns in totals.most_common():
        label = f"{CAUSE_GLYPHS[cause][0]} {WORDS[cause].label}"
        entries.append((label, f"{ns / total:.0%} {fmt.with_ms(ns / 1e6)}", "text"))
    spent = pairs(entries, width - GUTTER)[: max(0, height - 1)]
    heads = [f" {'went to':<{GUTTER - 1}}", *[" " * GUTTER] * len(spent)]
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


def _cells(pieces: Sequence[Piece], width: int) -> Line:
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


_BAR_WIDTH = 10


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
