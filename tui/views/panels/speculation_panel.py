"""What drafts of speculative decoding did in the last minute: accepted, bought, and from whom."""

from collections.abc import Callable
from typing import TypeAlias

from stepscope.recordings.session.drafts import Speculation, SpeculationGroup
from stepscope.recordings.state.session import request_name
from stepscope.tui.views.lines import Line, Run, framed
from stepscope.tui.views.theme import LEVELS

HEIGHT = 8
_LABEL, _CELL = 20, 9
_Text: TypeAlias = Callable[[SpeculationGroup], str]
_MIN_DRAFTS = 8  # of a request, before it is called the best or the worst


def draw(found: Speculation, width: int) -> list[Line]:
    groups = found.groups[-max(1, (width - 2 - _LABEL) // _CELL) :]
    rows = [
        _accepted(found),
        _by_request(found),
        _row(" requests at once", groups, _title, "muted"),
        _row(" tokens a step", groups, lambda each: f"{each.tokens_per_decode:.2f}", "multi"),
        _row(" time for drafts", groups, _extra, "text"),
        _gains(groups),
    ]
    hint: Line = (("time for drafts: fitted on steps without prefills", "muted"),)
    return framed(rows, width, HEIGHT, ((_heading(found), "title"),), hint)


def _heading(found: Speculation) -> str:
    most = found.pays_up_to
    if most is None:
        return "speculation  what it buys is not known"
    if not most:
        return "speculation  does not pay"
    rest = ", the most seen" if most == found.groups[-1].high else ""
    return f"speculation  pays for up to {most} requests at once{rest}"


def _accepted(found: Speculation) -> Line:
    total = found.total
    line: list[Run] = [
        (" accepted ", "muted"),
        (f"{total.accepted:,} of {total.drafted:,} drafts ({total.share or 0:.0%})", "multi"),
        ("   by position ", "muted"),
        (" ".join(f"{each.share or 0:.0%}" for each in found.positions) or "—", "text"),
        ("   over time ", "muted"),
    ]
    trend = [" " if each is None else LEVELS[min(7, int(each * 8))] for each in found.trend]
    return (*line, ("".join(trend), "multi"))


def _by_request(found: Speculation) -> Line:
    many = [each for each in found.requests.items() if each[1].drafted >= _MIN_DRAFTS]
    many.sort(key=lambda each: -(each[1].share or 0))
    shown = many[:2] + many[2:][-2:]
    words = ", ".join(
        f"{request_name(request_id)} {count.share or 0:.0%} of {count.drafted:,}"
        for request_id, count in shown
    )
    return ((" by request ", "muted"), (words or "—", "text"))


def _row(label: str, groups: list[SpeculationGroup], text: _Text, style: str) -> Line:
    cells = "".join(f"{text(each):>{_CELL}}" for each in groups)
    return ((f"{label:<{_LABEL}}", "muted"), (cells, style))


def _title(group: SpeculationGroup) -> str:
    return f"{group.low}" if group.low == group.high else f"{group.low}-{group.high}"


def _extra(group: SpeculationGroup) -> str:
    return "—" if group.extra is None else f"+{group.extra:.0%}"


def _gains(groups: list[SpeculationGroup]) -> Line:
    cells: list[Run] = [(f"{' tokens/s':<{_LABEL}}", "muted")]
    for each in groups:
        gain = each.gain
        style = "muted" if gain is None else "good" if gain >= 1 else "breach"
        cells.append((f"{'—' if gain is None else f'×{gain:.2f}':>{_CELL}}", style))
    return tuple(cells)
