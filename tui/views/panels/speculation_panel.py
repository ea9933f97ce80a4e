"""What drafts of speculative decoding did in the last minute: accepted, bought, and from whom."""

from stepscope.recordings.session.drafts import Speculation, SpeculationGroup
from stepscope.recordings.state.session import request_name
from stepscope.tui.views.lines import Line, Run, facts, framed
from stepscope.tui.views.theme import LEVELS

HEIGHT = 8
_LABEL, _CELL = 20, 9
_MIN_DRAFTS = 8  # of a request, before it is called the best or the worst


def draw(found: Speculation, width: int) -> list[Line]:
    groups = found.groups[-max(1, (width - 2 - _LABEL) // _CELL) :]
    many = [each for each in found.requests.items() if each[1].drafted >= _MIN_DRAFTS]
    many.sort(key=lambda each: -(each[1].share or 0))
    by_request = ", ".join(
        f"{request_name(request_id)} {count.share or 0:.0%} of {count.drafted:,}"
        for request_id, count in many[:2] + many[2:][-2:]
    )
    atonce = [f"{g.low}" if g.low == g.high else f"{g.low}-{g.high}" for g in groups]
    extra = ["—" if each.extra is None else f"+{each.extra:.0%}" for each in groups]
    rows = [
        _accepted(found),
        facts(" by request ", by_request or "—"),
        _row(" requests at once", [(text, "muted") for text in atonce]),
        _row(" tokens a step", [(f"{each.tokens_per_decode:.2f}", "multi") for each in groups]),
        _row(" time for drafts", [(text, "text") for text in extra]),
        _row(" tokens/s", [_gain(each) for each in groups]),
    ]
    most, said = found.pays_up_to, "does not pay"
    if most is None:
        said = "what it buys is not known"
    elif most:
        rest = ", the most seen" if most == found.groups[-1].high else ""
        said = f"pays for up to {most} requests at once{rest}"
    hint = "time for drafts: fitted on steps without prefills"
    return framed(rows, width, HEIGHT, f"speculation  {said}", hint)


def _accepted(found: Speculation) -> Line:
    total = found.total
    trend = [" " if each is None else LEVELS[min(7, int(each * 8))] for each in found.trend]
    return facts(
        " accepted ",
        (f"{total.accepted:,} of {total.drafted:,} drafts ({total.share or 0:.0%})", "multi"),
        "   by position ",
        " ".join(f"{each.share or 0:.0%}" for each in found.positions) or "—",
        "   over time ",
        ("".join(trend), "multi"),
    )


def _row(label: str, cells: list[Run]) -> Line:
    return facts(f"{label:<{_LABEL}}", *((f"{text:>{_CELL}}", style) for text, style in cells))


def _gain(group: SpeculationGroup) -> Run:
    if group.gain is None:
        return "—", "muted"
    return f"×{group.gain:.2f}", "good" if group.gain >= 1 else "breach"
