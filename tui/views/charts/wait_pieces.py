"""A panel that splits one wait for a token into pieces, each with its cause, in order of time."""

from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import late_text
from stepscope.tui.views.cause_names import CAUSE_GLYPHS
from stepscope.tui.views.lines import Line, clean, framed

_BAR_WIDTH, _NARROW_BAR_WIDTH = 20, 5
_NARROW = 100


def height_for(late: Late | None, room: int) -> int:
    """Return the height of the panel for this wait; 0 without room beside the list, or a wait."""
    if late is None or room < 10:
        return 0
    return min(len(late.pieces) + 2, room - 6)


def draw(late: Late, width: int, height: int) -> list[Line]:
    """Return the panel with its frame; its last line sums up the pieces that do not fit."""
    room = height - 2
    pieces = late.pieces if len(late.pieces) <= room else late.pieces[: room - 1]
    body = [_line(late, number, width - 2) for number in range(len(pieces))]
    if len(pieces) < len(late.pieces):
        rest = sum(piece.ns for piece in late.pieces[len(pieces) :])
        number_left = len(late.pieces) - len(pieces)
        body.append(((f" {rest / 1e6:>10,.1f} ms in {number_left} more", "muted"),))
    what = "first token" if not late.token_idx else f"token #{late.token_idx + 1}"
    title: Line = (
        (f"{what} of {request_name(late.request_id)}: {late.gap_ns / 1e6:,.1f} ms", "title"),
        ("  in order of time", "muted"),
    )
    hint: Line = ()
    if late.is_excused:
        hint = (("‖ the operator's pause, which breaks no service level", "mark"),)
    return framed(body, width, height, title, hint)


def _line(late: Late, number: int, width: int) -> Line:
    piece = late.pieces[number]
    glyph, style = CAUSE_GLYPHS[piece.cause]
    share = piece.ns / max(1, late.gap_ns)
    bar_width = _BAR_WIDTH if width >= _NARROW else _NARROW_BAR_WIDTH
    cells = max(1, round(share * bar_width))
    where = f" from step {piece.step:,}" if piece.num_steps else f" before step {piece.step:,}"
    room = max(8, width - 23 - bar_width)
    text = clean(late_text.of_piece(piece, room), room)
    where = where if len(text) + len(where) <= room else ""
    bar_style = "text" if style in ("preempted", "idle") else style
    return (
        (f" {piece.ns / 1e6:>10,.1f} ms {share:>4.0%} ", "strong" if share >= 0.5 else "text"),
        (glyph, style),
        (" ", "text"),
        ("▇" * cells + " " * (bar_width - cells + 1), bar_style),
        (text, "text"),
        (where, "muted"),
    )
