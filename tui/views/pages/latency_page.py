"""The latency page: latencies against the service levels, and why late tokens were late.

From the top: percentiles by time window, a heat map, and the list of breaches. A breach is a token
that came later than its service level.
"""

import math
from collections.abc import Sequence

from stepscope.recordings.attribution.front import FrontSums
from stepscope.recordings.session.drafts import Speculation
from stepscope.recordings.session.waits import Breach
from stepscope.recordings.state.latency import LatencyKind, Series
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.charts import lanes
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, Frame
from stepscope.tui.views.framed_panels import (
    Column,
    Rows,
    Target,
    beside,
    first_shown,
    room_of_last,
    table,
)
from stepscope.tui.views.lines import Line, Run, bounded, facts, first_fitting, framed, spot, titled
from stepscope.tui.views.panels import latency_panel
from stepscope.tui.views.theme import LEVELS

MAX_BREACHES = 200
_WIDE = 120  # from this width on there is a histogram beside the heat map
_READ_NS = 10_000_000_000  # of waits that are explained for one picture, at most
_MOST_ROWS = 100_000  # of steps to read for one wait
_NUM_LIMITS = 3
_NUM_FRONT_ENDS = 4
_KINDS: dict[LatencyKind, str] = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "step": "step"}
_SERVED: dict[LatencyKind, LatencyKind] = {"ttft": "served_ttft", "itl": "served_itl"}
_BLOCK = 51  # cells of one window
_COLUMNS = (
    Column("step", 9, True),
    Column("at", 8),
    Column("kind", 4),
    Column("request", 10),
    Column("ms", 8, True),
    Column("why", 0),
)


def listed(frame: Frame) -> list[Breach]:
    """Return the breaches up to the cursor, one per step and kind, in the order that was chosen."""
    windows = frame.history.windows
    if frame.view.longest_first:
        return windows.longest(frame.cursor, MAX_BREACHES, _first_kind(frame))
    return windows.breaches(frame.cursor, MAX_BREACHES)[::-1]


def _first_kind(frame: Frame) -> str:
    """Return the kind whose breaches come first: ITL, which longer first waits would hide."""
    return "TTFT" if frame.view.latency == "ttft" else "ITL"


def heading(frame: Frame, room: int) -> Line:
    """Return how many tokens are late, of what part of the session, their order and its key."""
    order, key = f"  newest first ({frame.key('reverse')}: longest)", frame.key("reverse")
    if frame.view.longest_first:
        order = f"  longest {_first_kind(frame)} first ({key}: newest)"
    late = frame.history.windows.late(frame.cursor)
    if not late.num_tokens:
        none = " (0 tokens late)" if frame.tells_requests else ""
        return titled(f"breaches{none}", order)
    end = None if frame.extent is None else frame.extent[1]
    is_at_end = frame.cursor is None or end is None or frame.cursor >= end
    of = ("" if frame.is_whole else " in memory") + ("" if is_at_end else " up to the cursor")
    # Count tokens, as `explain` does: several may be late in a step, but a line is a step and kind.
    tokens, steps = fmt.plural(late.num_tokens, "token"), fmt.plural(late.num_steps, "step")
    short = f"{late.num_tokens:,} late{of}".replace("the cursor", "here")
    forms = (f"{tokens} late in {steps}{of}", short)
    return first_fitting([titled(f"breaches ({form})", order) for form in forms], room)


def targets(frame: Frame) -> list[Target]:
    return [Target(breach.step, breach.request_id) for breach in listed(frame)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    rows = [*_figures(frame, width - 2), *_front_ends(frame), _limited(frame)]
    slo, own = frame.history.slo, frame.history.own_levels
    title: Line = (
        *titled("latency", f"  ms; service levels: TTFT <{slo.ttft_ms:g}  ITL <{slo.itl_ms:g}"),
        (f"  {own}" if own else "", "caution"),
        ("  ", "text"),
        *latency_panel.goodput(frame),
    )
    hint = facts("the operator's pauses are not counted")
    if (window_s := frame.window_s) is not None:
        hint = ((f"of the last minute {window_s:.0f} s are in memory", "caution"),)
    lines = framed(rows, width, len(rows) + 2, title, hint)
    if frame.speculation is not None and height - len(lines) >= _SPECULATION_HEIGHT + 8:
        lines += _speculation(frame.speculation, width)
    left = height - len(lines)
    if left >= 14:
        lines += _charts(frame, width, min(16, left // 2))
    rest, breaches, row = height - len(lines), listed(frame), frame.view.row
    first = first_shown(len(breaches), max(0, rest - 3), row)
    _explain(frame, breaches[first : first + max(0, rest - 3)])
    chosen = None
    if breaches:
        breach = breaches[min(row, len(breaches) - 1)]
        if not frame.view.live or _is_affordable(frame, breach):
            chosen = frame.history.wait(breach.step, breach.request_id)
    room = room_of_last(_COLUMNS, width - 2)
    listed_rows = Rows(len(breaches), lambda n: _row(frame, breaches[n], room))

    def drawn(height: int) -> list[Line]:
        body = table(_COLUMNS, listed_rows, width - 2, height - 2, row)
        if not breaches:
            body = [((" no token came later than the service levels", "good"),)]
            if not frame.tells_requests:
                body = [facts(" the engine does not report when tokens came")]
        where = f"{frame.key('inspect')} goes there"
        return framed(body, width, height, heading(frame, width - 6), where)

    return lines + lanes.with_wait(drawn, chosen, width, rest)


def _limited(frame: Frame) -> Line:
    shares = sorted(frame.limits.items(), key=lambda each: -each[1])[:_NUM_LIMITS]
    limits = [f"{'nothing' if limit == 'work' else limit} {share:.0%}" for limit, share in shares]
    return facts(" steps limited by ", ", ".join(limits) or "—")


def _figures(frame: Frame, width: int) -> list[Line]:
    slo, fitting = frame.history.slo, ("60 s", "10 s", "all")[: max(1, (width - 7) // _BLOCK)]
    reports = {name: report for name, report in frame.windows.items() if name in fitting}
    head: list[Run] = [("       ", "muted")]
    names = f"{'samples':>8}{'p50':>6}{'p95':>7}{'p99':>7}{'max':>7}{'in SLO':>8} "
    for name in reports:
        window_s, shown = frame.window_s, name
        if name == "all":
            shown = "all" if frame.is_whole else "mem"
        elif window_s is not None:
            shown = f"{min(window_s, float(name.removesuffix(' s'))):.0f} s"
        head += [("│ ", "frame"), (f"{shown:<5}", "strong"), (names, "muted")]
    lines: list[Line] = [tuple(head)]
    for kind, label in _KINDS.items():
        bound = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}.get(kind)
        mark, style = ("▶", "strong") if kind == frame.view.latency else (" ", "text")
        is_known = kind == "step" or frame.tells_requests or frame.is_summed_up
        found: list[Series] = [getattr(report, kind) for report in reports.values()]
        named: Line = (spot("latency", kind), (mark, "text"), (f"{label:<6}", style))
        lines.append((*named, *_blocks(found, bound, is_known)))
        served = _SERVED.get(kind, kind)
        found = [getattr(report, served) for report in reports.values()]
        if served != kind and any(series.num_samples for series in found):
            lines.append(((" served", "muted"), *_blocks(found, bound, is_known)))
    return lines


def _front_ends(frame: Frame) -> list[Line]:
    sums = FrontSums()
    sums.add(frame.state.requests.values())
    said: dict[str, list[str]] = {}
    for name, waits in sums.of().items():
        server, _, part = name.partition(": ")
        p50, p99 = (fmt.milliseconds(ns / 1e6) for ns in waits.percentiles(50, 99))
        said.setdefault(server, []).append(f"{part} {p50}/{p99}")
    return [
        facts(f" {server.removeprefix('API ')} p50/p99  ", ", ".join(parts))
        for server, parts in list(said.items())[:_NUM_FRONT_ENDS]
    ]


def _blocks(found: Sequence[Series], bound: float | None, is_known: bool) -> Line:
    line: list[Run] = []
    for series in found:
        number = fmt.short(series.num_samples) if series.num_samples or is_known else "—"
        line += [("│", "frame"), (f"{number:>14}", "muted")]
        for value in (series.p50_ms, series.p95_ms, series.p99_ms, series.max_ms):
            line.append(bounded(f"{fmt.milliseconds(value):>6}", value, bound, " "))
        kept, style = latency_panel.within_level(series, bound)
        line.append((f"{kept:>7} ", style))
    return tuple(line)


def _charts(frame: Frame, width: int, height: int) -> list[Line]:
    kind, slo = frame.view.latency, frame.history.slo
    # Use the samples that the table counts: it is updated less often than this is drawn.
    end_ns = frame.latency.end_ns
    # The seconds of the last minute in memory, rounded up to a multiple of four.
    known_s = math.ceil(frame.known_s(LATENCY_WINDOW_S) / 4) * 4
    window_s = float(min(60, max(4, known_s)))
    samples = frame.history.windows.samples(kind, end_ns, window_s)
    bound = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}.get(kind)
    name = _KINDS[kind]
    other = f"({frame.key('sort')}: another kind)"
    heat_title = titled(f"{name} × time", f"  last {window_s:g} s {other}")
    if not samples:
        text = f" no sample in the last {window_s:g} s"
        return framed([facts(text)], width, height, heat_title)
    spread_width = 0 if width < _WIDE else min(60, width * 2 // 5)
    heat_width = width - spread_width
    counted = latency_panel.count(samples, end_ns, window_s, heat_width - 11, height - 3, bound)
    heat = latency_panel.heat_map(counted, window_s)
    left = framed(heat, heat_width, height, heat_title, latency_panel.DENSITY_KEY)
    if not spread_width:
        return left
    spread = latency_panel.spread(counted, spread_width - 2)
    title = titled(f"{name} histogram", f"  {sum(map(sum, counted.cells)):,} samples")
    return beside(left, framed(spread, spread_width, height, title))


def _explain(frame: Frame, seen: Sequence[Breach]) -> None:
    """Explain as many of the visible breaches as one picture has time for."""
    lives, left_ns = frame.history.lives, _READ_NS
    # Reading forward in time costs less than backward.
    for each in sorted(seen, key=lambda each: each.step):
        is_known = lives.is_known(each.step, each.request_id)
        if not is_known and left_ns > 0 and _is_affordable(frame, each):
            frame.history.wait(each.step, each.request_id)
            left_ns -= each.ns


def _is_affordable(frame: Frame, breach: Breach) -> bool:
    """Return whether the wait of a breach is explained so soon that the picture does not stop."""
    num_rows = breach.ns / 1e9 * (frame.recent.steps_per_s or 0.0) * max(1, frame.state.num_running)
    return num_rows <= _MOST_ROWS or frame.history.lives.is_known(breach.step, breach.request_id)


def _row(frame: Frame, breach: Breach, room: int) -> list[Run]:
    why = f"… ({frame.key('inspect')} explains it)"
    if frame.history.lives.is_known(breach.step, breach.request_id):
        late = frame.history.wait(breach.step, breach.request_id)
        why = "not in memory any more" if late is None else late_text.of_wait(late, room)
    more = f" +{breach.num_tokens - 1}" if breach.num_tokens > 1 else ""
    return [
        (f"{breach.step:,}", "text"),
        (frame.clock(breach.time_ns), "muted"),
        (breach.kind, "text"),
        (f"{request_name(breach.request_id)}{more}", "strong"),
        (f"{fmt.milliseconds(breach.ns / 1e6)}!", "breach"),
        (why, "text"),
    ]


_SPECULATION_HEIGHT = 8
_MIN_DRAFTS = 8  # of a request, before it is called the best or the worst
_LABEL, _CELL = 20, 9


def _speculation(found: Speculation, width: int) -> list[Line]:
    groups = found.groups[-max(1, (width - 2 - _LABEL) // _CELL) :]
    atonce = [f"{g.low}" if g.low == g.high else f"{g.low}-{g.high}" for g in groups]
    extra = ["—" if each.extra is None else f"+{each.extra:.0%}" for each in groups]
    many = [each for each in found.requests.items() if each[1].drafted >= _MIN_DRAFTS]
    many.sort(key=lambda each: -(each[1].share or 0))
    by_request = [
        f"{request_name(request_id)} {count.share or 0:.0%} of {count.drafted:,}"
        for request_id, count in many[:2] + many[2:][-2:]
    ]
    total = found.total
    trend = [" " if each is None else LEVELS[min(7, int(each * 8))] for each in found.trend]
    accepted = facts(
        " accepted ",
        (f"{total.accepted:,} of {total.drafted:,} drafts ({total.share or 0:.0%})", "multi"),
        "   by position ",
        " ".join(f"{each.share or 0:.0%}" for each in found.positions) or "—",
        "   over time ",
        ("".join(trend), "multi"),
    )
    gains = [
        ("—", "muted") if gain is None else (f"×{gain:.2f}", "good" if gain >= 1 else "breach")
        for gain in (each.gain for each in groups)
    ]
    speeds = [(f"{each.tokens_per_decode:.2f}", "multi") for each in groups]
    rows = [
        accepted,
        facts(" by request ", ", ".join(by_request) or "—"),
        _spec_row(" requests at once", [(text, "muted") for text in atonce]),
        _spec_row(" tokens a step", speeds),
        _spec_row(" time for drafts", [(text, "text") for text in extra]),
        _spec_row(" tokens/s", gains),
    ]
    most, said = found.pays_up_to, "does not pay"
    if most is None:
        said = "what it buys is not known"
    elif most:
        rest = ", the most seen" if most == found.groups[-1].high else ""
        said = f"pays for up to {most} requests at once{rest}"
    hint = "time for drafts: fitted on steps without prefills"
    return framed(rows, width, _SPECULATION_HEIGHT, f"speculation  {said}", hint)


def _spec_row(label: str, cells: list[Run]) -> Line:
    return facts(f"{label:<{_LABEL}}", *((f"{text:>{_CELL}}", style) for text, style in cells))
