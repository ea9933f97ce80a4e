"""Lanes of requests that prefill on one engine and decode on another, on one time axis."""

from collections.abc import Sequence

from stepscope.recordings.fleets.whole_lives import WholeLife
from stepscope.recordings.state.session import request_name
from stepscope.tui.views.lines import Line, Run, clean, fitted, joined

CELL_NS = 100_000_000
_LABEL = 24

_PREFILL: Run = ("▓", "prefill")
_WAIT: Run = ("·", "idle")
_WAY: Run = ("→", "caution")
_DECODE: Run = ("━", "decode")
_END: Run = ("●", "finished")
_NOTHING: Run = (" ", "text")
LEGEND: Line = (
    _PREFILL, (" prefill  ", "muted"), _WAIT, (" waits  ", "muted"),
    _WAY, (" handed over  ", "muted"), _DECODE, (" decode", "muted"),
)  # fmt: skip


def draw(lives: Sequence[WholeLife], now_ns: int, width: int, height: int) -> list[Line]:
    """Return one line for each of the newest requests that fit, the oldest of these on top."""
    cells = max(0, width - _LABEL - 1)
    begin_ns = now_ns - cells * CELL_NS
    shown = [life for life in lives if life.end_ns is None or life.end_ns > begin_ns][-height:]
    return [fitted((*_label(life), *_lane(life, begin_ns, now_ns, cells)), width) for life in shown]


def seconds(width: int) -> float:
    """Return how many seconds lanes of this width show."""
    return max(0, width - _LABEL - 1) * CELL_NS / 1e9


def _label(life: WholeLife) -> Line:
    names = request_name(life.request_id)
    if life.decode_id is not None:
        names += f"→{request_name(life.decode_id)}"
    room = _LABEL - len(names) - 3
    return ((f" {names} ", "text"), (f"{clean(life.client_id, room):<{room}}  ", "muted"))


def _lane(life: WholeLife, begin_ns: int, now_ns: int, cells: int) -> Line:
    return joined(_cell(life, begin_ns + place * CELL_NS, now_ns) for place in range(cells))


def _cell(life: WholeLife, start_ns: int, now_ns: int) -> Run:
    """Return what the request did from `start_ns` on; a transfer gets a cell, however short."""
    end_ns = start_ns + CELL_NS
    gone_ns = now_ns if life.end_ns is None else life.end_ns
    if end_ns <= life.arrival_ns or start_ns >= gone_ns:
        return _NOTHING
    if life.end_ns is not None and end_ns >= life.end_ns:
        return _END
    if start_ns < life.waited_until_ns:
        return _WAIT
    if life.first_token_ns is None or start_ns < life.first_token_ns - CELL_NS:
        return _PREFILL
    if life.received_ns is not None and life.sent_ns is not None:
        if start_ns <= life.received_ns and life.sent_ns < end_ns:
            return _WAY
        if start_ns > life.received_ns:
            return _WAIT if start_ns < life.loaded_after_ns else _DECODE
    if start_ns < life.first_token_ns:
        return _PREFILL
    return _DECODE if life.decodes_here else _WAIT
