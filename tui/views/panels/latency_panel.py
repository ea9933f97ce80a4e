"""Latencies against the service levels: the panel, and charts of one kind for the latency page.

The panel has the last minute, the last stall and the worst one. The charts are a heat map over
time, and a histogram.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.recordings.session.sums import Sums, per
from stepscope.recordings.state.latency import TREND_BUCKETS, Series
from stepscope.recordings.state.latency_samples import Samples
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, OLD_S, Frame
from stepscope.tui.views.framed_panels import labelled, sparkline
from stepscope.tui.views.lines import (
    Line,
    Run,
    bounded,
    facts,
    first_fitting,
    framed,
    length_of,
    spot,
)

# Bands per decade; the finest division that fits is used.
_PER_DECADE = (24, 18, 15, 12, 10, 9, 8, 7, 6, 5, 4.5, 4, 3.5, 3, 2.5, 2, 1.5, 1)
_DENSITY = " ·░▒▓█"
DENSITY_KEY: Line = (("·░▒▓█", "decode"), (" few to many ", "muted"), ("! late", "breach"))
_GOOD_SHARE = 0.95  # least share of samples within the service level to be called good


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    report, slo = frame.latency, frame.history.slo
    trend_width = width - 4 - 40
    worst = f"worst of {LATENCY_WINDOW_S / max(1, min(trend_width, TREND_BUCKETS)):.0f} s"
    heading = "        p50    p95    p99  SLO           "
    if trend_width > 0:
        # Put it above the trend; if the trend is narrow, begin left of it, in free cells.
        heading = heading[: max(30, min(len(heading), width - 3 - len(worst)))] + worst
    body = [
        facts(heading),
        _row("TTFT", report.ttft, slo.ttft_ms, trend_width),
        _row("ITL", report.itl, slo.itl_ms, trend_width),
        _row("TPOT", report.tpot, None, trend_width),
        _row("step", report.step, None, trend_width),
        _wall(frame, width - 2),
        *_stalls(frame, width - 2),
    ]
    about = ", estimated from buckets" if frame.is_summed_up and not frame.imported else ""
    begun_s, style = frame.known_s(LATENCY_WINDOW_S), "muted"
    said = f"last {begun_s:.0f} s{about}"
    if frame.figures_age_s >= OLD_S:
        said, style = f"{begun_s:.0f} s up to {fmt.span(frame.figures_age_s)} ago{about}", "caution"
    if (window_s := frame.window_s) is not None:
        said, style = f"last {window_s:.0f} s: the rest is not in memory", "caution"
    title: Line = (("latency", "title"), (f" ms ({said})", style))
    return framed(body, width, height, title, goodput(frame))


def one_line(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the panel as one line: percentiles of TTFT and ITL, and the last stall."""
    report, slo, window_s = frame.latency, frame.history.slo, frame.window_s
    cut: Line = () if window_s is None else ((f" {window_s:.0f} s:", "caution"),)
    ttft, itl = _percentiles(report.ttft, slo.ttft_ms), _percentiles(report.itl, slo.itl_ms)
    line = (*cut, *facts(" TTFT "), *ttft, *facts(" ITL "), *itl)
    stall = frame.stall
    said = "" if stall is None else late_text.of_stall(stall, width - length_of(line) - 2)
    return [(*line, ("│ ", "frame"), (said, "text")) if said else line]


def _percentiles(values: Series, bound: float | None, width: int = 0) -> Line:
    """Return p50, p95, p99: each in `width` cells and one for a mark, or apart by a blank."""
    runs = (
        bounded(f"{fmt.milliseconds(value):>{width}}", value, bound, " " * (width > 0))
        for value in (values.p50_ms, values.p95_ms, values.p99_ms)
    )
    return tuple((text if width else f"{text} ", style) for text, style in runs)


def _row(name: str, values: Series, bound: float | None, trend_width: int) -> Line:
    level = " " * 6 if bound is None else f"<{bound:<5g}"
    kept, style = within_level(values, bound)
    slo: Line = ((" ", "text"), (level, "muted"), (f"{kept:>6} ", style))
    trend = (sparkline(values.trend_ms, trend_width), "decode")
    head: Line = (spot("latency", name.lower()), (f" {name:<5}", "text"))
    return (*head, *_percentiles(values, bound, 6), *slo, trend)


def within_level(values: Series, bound: float | None) -> Run:
    """Return the share of samples within the service level; blank if there is none of either."""
    if bound is None or values.within_slo is None:
        return "", "muted"
    style = "good" if values.within_slo >= _GOOD_SHARE else "breach"
    return fmt.exact_percent(values.within_slo), style


def _wall(frame: Frame, width: int) -> Line:
    minute = Sums() if frame.history.is_short else frame.minute
    spent_ns = (minute.model_ns, minute.device_ns, minute.schedule_ns, minute.busy_ns)
    found = (per(ns, minute.span_ns) for ns in spent_ns)
    model, device, schedule, busy = (None if each is None else min(1.0, each) for each in found)
    shares = {"model": model}
    if model is not None and device is not None:
        shares = {"gpu": device, "host": max(0.0, model - device)}
    shares |= {"sched": schedule, "idle": None if busy is None else 1.0 - busy}
    line = facts(" wall ")
    for name, share in shares.items():
        line += facts(f"{name} ", f"{fmt.percent(share)}  ")
    mixed = fmt.percent(per(minute.num_mixed, minute.num_steps))
    forms = [(*line, *facts(name, mixed)) for name in ("mixed steps ", "mixed ")]
    return first_fitting(forms, width)


def goodput(frame: Frame) -> Line:
    share, rate = frame.kept.share, per(frame.kept.num_kept, frame.minute.seconds)
    if share is None or rate is None:
        return ()
    below = "breach" if frame.kept.is_low else "caution"
    style = "good" if share >= _GOOD_SHARE else below
    return facts("goodput ", (f"{share:.0%} ", style), (f"{rate:.1f} req/s", "text"))


def _stalls(frame: Frame, width: int) -> list[Line]:
    label = " last stall: "
    if frame.stall is None:
        said = "none above the ITL bound"
        if not frame.tells_requests:
            said = "— (the engine does not report its tokens)"
        elif frame.history.is_short:
            said = "looking further back …"
        lines = [facts(label + said)]
    else:
        stall = late_text.of_stall(frame.stall, width - len(label))
        lines = [(spot("step", frame.stall.step), *facts(label, stall))]
    worst, key = next(iter(frame.worst.longest), None), frame.key("worst")
    if worst is None or (frame.stall is not None and frame.stall.step == worst.step):
        is_worst = frame.stall is not None and frame.worst.number > 1
        return [*lines, facts(" it is the worst in memory")] if is_worst else lines
    kind = "" if worst.kind == "ITL" else f"{worst.kind} "
    how_long = (f"{kind}{fmt.with_ms(worst.ns / 1e6)}", "breach")
    who = request_name(worst.request_id)
    if worst.kind == "ITL":
        who = fmt.plural(worst.num_tokens, "stream")
    when = f" at {frame.clock(worst.time_ns)}, {who}"
    full = facts(" worst in memory: ", how_long, (when, "text"), f", step {worst.step:,}")
    forms = [(*full, *facts(f" ({key} goes there)"))]
    forms.append(facts(" worst: ", how_long, (when, "muted"), (f" ({key})", "muted")))
    return [*lines, (spot("step", worst.step), *first_fitting(forms, width))]


class Counted(NamedTuple):
    """Numbers of latency samples, by latency band (above its edge in ms) and by time slice."""

    edges: list[float]  # the service level is one: a band is late as a whole, or not at all
    num_late: int  # the last so many bands are late
    cells: list[list[int]]  # by band, then by slice


def count(
    samples: Samples,
    end_ns: int,
    window_s: float,
    num_slices: int,
    most_bands: int,
    bound_ms: float | None,  # the service level
) -> Counted:
    base_ns = (1.0 if bound_ms is None else bound_ms) * 1e6
    ranked = samples.ranked()
    assert ranked is not None
    # A sample exactly as long as the service level is not late.
    extremes = (ranked.smallest, ranked.largest)
    low, high = (math.log10(max(1, each - 1) / base_ns) for each in extremes)
    finest = (each for each in _PER_DECADE if _num_bands(low, high, each) <= most_bands)
    per_decade: float = next(finest, 1)
    while _num_bands(low, high, per_decade) > max(2, most_bands):  # one on each side of the level
        per_decade /= 2
    first, last = math.floor(low * per_decade), math.floor(high * per_decade)
    edges_ns = [base_ns * 10 ** (at / per_decade) for at in range(first, last + 1)]
    cells = _by_slice(samples, end_ns, round(window_s * 1e9), num_slices, edges_ns[1:])
    edges = [edge_ns / 1e6 for edge_ns in edges_ns]
    num_late = 0 if bound_ms is None else max(0, min(len(edges), last + 1))
    return Counted(edges, num_late, cells)


def _by_slice(
    samples: Samples, end_ns: int, extent_ns: int, num_slices: int, upper_ns: Sequence[float]
) -> list[list[int]]:
    """Return counts by band and slice; samples beyond either end are in the first or last slice."""
    cells = [[0] * num_slices for _ in range(len(upper_ns) + 1)]
    begin = 0
    for x in range(num_slices):
        end = len(samples)
        if x < num_slices - 1:  # up to the start of the next slice
            next_ns = end_ns - extent_ns - (-(x + 1) * extent_ns // num_slices)
            end = samples.num_until(next_ns - 1)
        part = samples.ranked(begin, end)
        begin = end
        if part is None:
            continue
        before = 0
        for band, edge_ns in enumerate(upper_ns):
            up_to = part.num_up_to(edge_ns)
            cells[band][x] = up_to - before
            before = up_to
        cells[-1][x] = part.count - before
    return cells


def _num_bands(low: float, high: float, per_decade: float) -> int:
    return math.floor(high * per_decade) - math.floor(low * per_decade) + 1


def heat_map(counted: Counted, window_s: float) -> list[Line]:
    """Return the heat map: a column per time slice, a row per latency band, glyphs for counts."""
    most = max(max(row) for row in counted.cells)
    lines: list[Line] = []
    for band in range(len(counted.edges) - 1, -1, -1):
        text = "".join([_dense(number, most) for number in counted.cells[band]])
        lines.append(_band(counted, band, text))
    axis = _time_axis(len(counted.cells[0]), window_s)
    return [*lines, (*labelled("ms", 8, "┤"), (axis, "muted"))]


def spread(counted: Counted, width: int) -> list[Line]:
    """Return a horizontal histogram with the bands of the heat map."""
    counts = [sum(row) for row in counted.cells]
    total, most, room = sum(counts), max(counts), max(4, width - 23)
    lines: list[Line] = []
    for band in range(len(counts) - 1, -1, -1):
        cells = "█" * round(counts[band] / most * room) or ("▌" if counts[band] else "")
        said = f" {fmt.short(counts[band]):>5} {counts[band] / total:>6.1%}"
        lines.append((*_band(counted, band, f"{cells:<{room}}"), (said, "muted")))
    return lines


def _band(counted: Counted, band: int, text: str) -> Line:
    label, edge = labelled(fmt.milliseconds(counted.edges[band]), 8)
    if band >= len(counted.edges) - counted.num_late:
        return (label, ("!", "breach"), (text, "breach"))
    return (label, edge, (text, "decode"))


def _dense(number: int, most: int) -> str:
    if not number:
        return " "
    share = math.log1p(number) / math.log1p(max(1, most))
    return _DENSITY[min(len(_DENSITY) - 1, 1 + int(share * (len(_DENSITY) - 1.001)))]


def _time_axis(room: int, window_s: float) -> str:
    axis = ["─"] * room
    for quarter in (4, 3, 2, 1):
        label = f"┴-{window_s * quarter / 4:g}s"
        x = room - room * quarter // 4
        if x + len(label) <= room:
            axis[x : x + len(label)] = label
    return "".join(axis)
