"""The latency page: latencies against the service levels, and why late tokens were late.

From the top: percentiles by time window, a heat map with a histogram, and the list of breaches. A
breach is a token that came later than its service level.
"""

import math
from collections.abc import Sequence

from stepscope.recordings.attribution.front import FrontSums
from stepscope.recordings.session.late_waits import Breach
from stepscope.recordings.state.series.latency import LatencyKind, LatencyReport, Series
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.charts import latency_charts, life_line
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.latency_windows import WINDOWS
from stepscope.tui.views.framed_panels import (
    Cell,
    Column,
    Target,
    beside,
    first_shown,
    room_of_last,
    table,
)
from stepscope.tui.views.lines import Line, Run, clean, framed, length_of, spot
from stepscope.tui.views.panels import speculation_panel

MAX_BREACHES = 200


def listed(frame: Frame) -> list[Breach]:
    """Return the breaches up to the cursor, one per step and kind, in the order that was chosen."""
    windows = frame.history.windows
    if frame.view.longest_first:
        return windows.longest(frame.cursor, MAX_BREACHES, _first_kind(frame))
    return windows.breaches(frame.cursor, MAX_BREACHES)[::-1]


def heading(frame: Frame, room: int) -> Line:
    """Return how many tokens are late, their order and its key, in as many words as fit."""
    order = (f"  {_order(frame)}", "muted")
    late = frame.history.windows.late(frame.cursor)
    if not late.num_breaches and not frame.tells_requests:
        return (("breaches", "title"), order)
    tokens = "1 token" if late.num_tokens == 1 else f"{late.num_tokens:,} tokens"
    steps = "1 step" if late.num_steps == 1 else f"{late.num_steps:,} steps"
    # Count tokens, as `explain` does: several may be late in a step, but a line is a step and kind.
    in_full = f"{tokens} late in {steps}" if late.num_breaches else "0 tokens late"
    of_what = _of_what(frame)
    in_short = f"{late.num_tokens:,} late"
    forms = [f"{in_full}{of_what}", f"{in_short} in {steps}{of_what}", f"{in_short}{of_what}"]
    forms.append(forms[-1].replace("the cursor", "here"))
    if late.num_breaches > MAX_BREACHES:
        which = "longest" if frame.view.longest_first else "last"
        forms.insert(0, f"{forms[0]}, the {which} {MAX_BREACHES} shown")
    lines: list[Line] = [((f"breaches ({form})", "title"), order) for form in forms]
    return next((line for line in lines if length_of(line) <= room), lines[-1])


def _of_what(frame: Frame) -> str:
    """Return to what part of the session the number of late tokens applies; empty if to all."""
    end = None if frame.extent is None else frame.extent[1]
    is_at_end = frame.cursor is None or end is None or frame.cursor >= end
    in_memory = "" if frame.is_whole else " in memory"
    return in_memory if is_at_end else f"{in_memory} up to the cursor"


def _first_kind(frame: Frame) -> str:
    """Return the kind whose breaches come first: ITL, which longer first waits would hide."""
    return "TTFT" if frame.view.latency == "ttft" else "ITL"


def _order(frame: Frame) -> str:
    key = frame.key("reverse")
    if frame.view.longest_first:
        return f"longest {_first_kind(frame)} first ({key}: newest)"
    return f"newest first ({key}: longest)"


NARROW = 100  # below this width no histogram beside the heat map
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


def targets(frame: Frame) -> list[Target]:
    """Return a target for each breach, in the order of the list."""
    return [Target(breach.step, breach.request_id) for breach in listed(frame)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    rows = [*_figures(frame, width - 2), *_front_ends(frame), _limited(frame)]
    slo = frame.history.slo
    title: Line = (
        ("latency", "title"),
        (f"  ms; service levels: TTFT <{slo.ttft_ms:g}  ITL <{slo.itl_ms:g}", "muted"),
        (f"  {own}" if (own := frame.history.own_levels) else "", "caution"),
        *_goodput(frame),
    )
    hint: Line = (("the operator's pauses are not counted", "muted"),)
    if (window_s := frame.window_s) is not None:
        hint = ((f"of the last minute {window_s:.0f} s are in memory", "caution"),)
    lines = framed(rows, width, len(rows) + 2, title, hint)
    if frame.speculation is not None and height - len(lines) >= speculation_panel.HEIGHT + 8:
        lines += speculation_panel.draw(frame.speculation, width)
    left = height - len(lines)
    chart_height = 0 if left < 14 else min(16, left // 2)
    if chart_height:
        lines += _charts(frame, width, chart_height)
    rest = height - len(lines)
    breaches = listed(frame)
    chosen = None
    if breaches:
        breach = breaches[min(frame.view.row, len(breaches) - 1)]
        if not frame.view.live or _is_affordable(frame, breach):
            chosen = frame.history.wait(breach.step, breach.request_id)
    pieces_height = life_line.wait_height(chosen, rest)
    rest -= pieces_height
    shown = _explained(frame, breaches, max(0, rest - 3), width)
    body = table(_COLUMNS, shown, width - 2, rest - 2, frame.view.row if breaches else None)
    if not breaches:
        body = [((" no token came later than the service levels", "good"),)]
        if not frame.tells_requests:
            body = [((" the engine does not report when tokens came", "muted"),)]
    title = heading(frame, width - 6)
    lines += framed(body, width, rest, title, ((f"{frame.key('inspect')} goes there", "muted"),))
    if chosen is not None and pieces_height:
        lines += life_line.draw_wait(chosen, width, pieces_height)
    return lines


def _limited(frame: Frame) -> Line:
    """Return what limited most steps of the last minute, and the time share of recompute."""
    shares = sorted(frame.limits.items(), key=lambda each: -each[1])[:_NUM_LIMITS]
    limits = ", ".join(
        f"{'nothing' if limit == 'work' else limit} {share:.0%}" for limit, share in shares
    )
    tax = frame.rates.recompute_tax
    line: Line = ((" steps limited by ", "muted"), (limits or "—", "text"))
    if tax is None:
        return line
    return (*line, ("   recompute tax ", "muted"), (f"{tax:.1%}", "caution" if tax else "text"))


def _goodput(frame: Frame) -> Line:
    goodput = frame.goodput
    if not goodput.num_judged or goodput.per_s is None:
        return ()
    kept = f"{goodput.num_kept} of {goodput.num_judged} requests kept both"
    return ((f"  goodput {goodput.per_s:.1f} req/s", "text"), (f", {kept}", "muted"))


# Percentiles


def _figures(frame: Frame, width: int) -> list[Line]:
    """Return the table of latencies: as many time windows as fit, the last minute among them."""
    slo = frame.history.slo
    reports = frame.windows
    names = [name for name, _ in WINDOWS]
    if width < 7 + 3 * _BLOCK:
        names = ["10 s", "60 s"] if width >= 7 + 2 * _BLOCK else ["60 s"]
    head: list[Run] = [("       ", "muted")]
    for name in names:
        head += [
            ("│ ", "frame"),
            (f"{_title(frame, name):<5}", "strong"),
            (f"{'samples':>8}{'p50':>6}{'p95':>7}{'p99':>7}{'max':>7}{'in SLO':>8} ", "muted"),
        ]
    lines: list[Line] = [tuple(head)]
    for kind, label in _KINDS.items():
        bound = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}.get(kind)
        chosen = kind == frame.view.latency
        line: list[Run] = [
            spot("latency", kind),
            ("▶" if chosen else " ", "text"),
            (f"{label:<6}", "strong" if chosen else "text"),
        ]
        found = [reports.get(name) for name in names]
        is_known = kind == "step" or frame.tells_requests or frame.is_summed_up
        for report in found:
            line += _block(None if report is None else _series(report, kind), bound, is_known)
        lines.append(tuple(line))
        if (served := _SERVED.get(kind)) is None:
            continue
        told = [None if report is None else _series(report, served) for report in found]
        if any(series is not None and series.num_samples for series in told):
            blocks = [run for series in told for run in _block(series, bound, is_known)]
            lines.append(((" served", "muted"), *blocks))
    return lines


def _front_ends(frame: Frame) -> list[Line]:
    """Return a line for each API server: how slow it was, by live and recent requests."""
    sums = FrontSums()
    sums.add(frame.state.requests.values())
    said: dict[str, list[str]] = {}
    for name, waits in sums.of().items():
        server, _, part = name.partition(": ")
        p50, p99 = (fmt.milliseconds(ns / 1e6) for ns in waits.percentiles(50, 99))
        said.setdefault(server, []).append(f"{part} {p50}/{p99}")
    return [
        ((f" {server.removeprefix('API ')} p50/p99  ", "muted"), (", ".join(parts), "text"))
        for server, parts in list(said.items())[:_NUM_FRONT_ENDS]
    ]


def _title(frame: Frame, name: str) -> str:
    """Return the title of a window's column: its length, less if memory holds less of a replay."""
    length_s = dict(WINDOWS)[name]
    window_s = frame.window_s
    if length_s is None:
        return name if frame.is_whole else "mem"
    return name if window_s is None or window_s >= length_s else f"{window_s:.0f} s"


def _series(report: LatencyReport, kind: LatencyKind) -> Series:
    series: Series = getattr(report, kind)
    return series


def _block(series: Series | None, bound: float | None, is_known: bool) -> Line:
    if series is None:
        return (("│", "frame"), (" " * (_BLOCK - 1), "text"))
    number = fmt.short(series.num_samples) if series.num_samples or is_known else "—"
    line: list[Run] = [("│", "frame"), (f"{number:>14}", "muted")]
    for value in (series.p50_ms, series.p95_ms, series.p99_ms, series.max_ms):
        late = value is not None and bound is not None and value > bound
        text = fmt.milliseconds(value) + ("!" if late else " ")
        line.append((f"{text:>7}", "breach" if late else "text"))
    kept = ""
    style = "muted"
    if bound is not None and series.within_slo is not None:
        kept = f"{min(series.within_slo, 0.999 if series.within_slo < 1 else 1.0):.1%}"
        style = "good" if series.within_slo >= 0.95 else "breach"
    return (*line, (f"{kept:>7} ", style))


def _charts(frame: Frame, width: int, height: int) -> list[Line]:
    kind = frame.view.latency
    minute = frame.windows.get("60 s")
    # Use the samples that the table counts: it is updated less often than this is drawn.
    end_ns = frame.state.time_ns if minute is None else minute.end_ns
    window_s = _extent_s(frame, end_ns)
    samples = frame.history.windows.samples(kind, end_ns, window_s)
    slo = frame.history.slo
    bound = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}.get(kind)
    name = _KINDS[kind]
    heat_title: Line = ((f"{name} × time", "title"), (f"  last {window_s:g} s", "muted"))
    if not samples:
        text = f" no sample in the last {window_s:g} s"
        return framed([((text, "muted"),)], width, height, heat_title)
    spread_width = 0 if width < NARROW else min(60, width * 2 // 5)
    heat_width = width - spread_width
    counted = latency_charts.count(samples, end_ns, window_s, heat_width - 11, height - 3, bound)
    heat = latency_charts.heat_map(counted, window_s)
    left = framed(heat, heat_width, height, heat_title, latency_charts.DENSITY_KEY)
    if not spread_width:
        return left
    title: Line = (
        (f"{name} spread", "title"),
        (f"  samples ({frame.key('sort')}: another kind)", "muted"),
    )
    spread = latency_charts.spread(counted, spread_width - 2)
    return beside(left, framed(spread, spread_width, height, title))


def _extent_s(frame: Frame, end_ns: int) -> float:
    """Return the seconds of the last minute in memory, rounded up to a multiple of four."""
    first = None if frame.first_step is None else frame.history.summary(frame.first_step)
    if first is None:
        return 60.0
    seconds = (end_ns - first.schedule_start_ns) / 1e9
    return float(min(60, max(4, math.ceil(seconds / 4) * 4)))


# Breaches


def _seen(frame: Frame, breaches: Sequence[Breach], room: int) -> Sequence[Breach]:
    first = first_shown(len(breaches), room, frame.view.row if breaches else None)
    return breaches[first : first + room]


def _is_affordable(frame: Frame, breach: Breach) -> bool:
    """Return whether the wait of a breach is explained so soon that the picture does not stop."""
    num_rows = breach.ns / 1e9 * (frame.rates.steps_per_s or 0.0) * max(1, frame.state.num_running)
    return num_rows <= _MOST_ROWS or frame.history.lives.is_known(breach.step, breach.request_id)


def _explained(frame: Frame, breaches: Sequence[Breach], room: int, width: int) -> list[list[Cell]]:
    """Return the rows of all breaches, the visible explained."""
    whys = {}
    why_room = room_of_last(_COLUMNS, width - 2)
    left_ns = _READ_NS
    # Reading forward in time costs less than backward.
    for breach in sorted(_seen(frame, breaches, room), key=lambda each: each.step):
        if not frame.history.lives.is_known(breach.step, breach.request_id):
            if left_ns <= 0 or not _is_affordable(frame, breach):
                whys[breach] = f"… ({frame.key('inspect')} explains it)"
                continue
            left_ns -= breach.ns
        late = frame.history.wait(breach.step, breach.request_id)
        whys[breach] = "not in memory any more"
        if late is not None:
            whys[breach] = late_text.of_wait(late, why_room)
    rows: list[list[Cell]] = []
    for breach in breaches:
        why = whys.get(breach, "")
        rows.append(
            [
                (f"{breach.step:,}", "text"),
                (fmt.clock(frame.history.wall_ns(breach.time_ns)), "muted"),
                (breach.kind, "text"),
                (_request(breach), "strong"),
                (f"{fmt.milliseconds(breach.ns / 1e6)}!", "breach"),
                (clean(why, 300), "text"),
            ]
        )
    return rows


def _request(breach: Breach) -> str:
    """Return the request that waited longest, and how many more tokens of that step were late."""
    more = f" +{breach.num_tokens - 1}" if breach.num_tokens > 1 else ""
    return f"{request_name(breach.request_id)}{more}"
