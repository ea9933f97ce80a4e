"""Latencies of the last minute against the service levels, the last stall and the worst one."""

from stepscope.recordings.session.late_waits import Breach
from stepscope.recordings.state.series.latency import TREND_BUCKETS, Series
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, OLD_S, Frame
from stepscope.tui.views.lines import Line, Run, framed, length_of, spot
from stepscope.tui.views.theme import LEVELS

_GOOD_SHARE = 0.95  # least share of samples within the service level to be called good
_NAMES = ("TTFT", "ITL", "TPOT", "step")


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    report, slo = frame.latency, frame.history.slo
    trend_width = width - 4 - 40
    slices = max(1, min(trend_width, TREND_BUCKETS))
    worst = f"worst of {LATENCY_WINDOW_S / slices:.0f} s"
    heading = "        p50    p95    p99  SLO           "
    if trend_width > 0:
        # Put it above the trend; if the trend is narrow, begin left of it, in free cells.
        heading = heading[: max(30, min(len(heading), width - 3 - len(worst)))] + worst
    body: list[Line] = [((heading, "muted"),)]
    bounds = (slo.ttft_ms, slo.itl_ms, None, None)
    series = (report.ttft, report.itl, report.tpot, report.step)
    for name, values, bound in zip(_NAMES, series, bounds, strict=True):
        body.append(_row(name, values, bound, trend_width))
    body.append(_wall(frame, width - 2))
    body += _stall(frame, width - 3)
    window_s = frame.window_s
    about = ", estimated from buckets" if frame.is_summed_up and not frame.imported else ""
    begun_s = frame.known_s(LATENCY_WINDOW_S)
    said: Run = (f" ms (last {begun_s:.0f} s{about})", "muted")
    if frame.figures_age_s >= OLD_S:
        said = (
            f" ms ({begun_s:.0f} s up to {fmt.span(frame.figures_age_s)} ago{about})",
            "caution",
        )
    if window_s is not None:
        said = (f" ms (last {window_s:.0f} s: the rest is not in memory)", "caution")
    title: Line = (("latency", "title"), said)
    return framed(body, width, height, title, _goodput(frame))


def one_line(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the panel as one line: percentiles and stalls, without names and TPOT if need be."""
    report, slo = frame.latency, frame.history.slo
    waits = [_percentiles("TTFT", report.ttft, slo.ttft_ms)]
    waits.append(_percentiles("ITL", report.itl, slo.itl_ms))
    tpot = _percentiles("TPOT", report.tpot, None)
    named: Line = ((" ms p50 p95 p99:", "muted"),)
    cut: Line = ()
    if (window_s := frame.window_s) is not None:
        cut = ((f" {window_s:.0f} s:", "caution"),)
        named = ((" ms p50 p95 p99 of", "muted"), *cut)
    shortest: Line = (*cut, *(run for wait in waits for run in wait))
    lines: list[Line] = [(*named, *shortest[len(cut) :], *tpot), (*shortest, *tpot), shortest]
    worst = _worst_in_short(frame)
    whole_stall = "" if frame.stall is None else frame.stall.text
    for line in lines:
        room = width - length_of(line) - 2 - length_of(worst)
        if room >= len(whole_stall) or line is shortest:
            stall = "" if frame.stall is None else late_text.of_stall(frame.stall, room)
            runs: Line = ((stall, "text"), *worst) if stall else worst[1:]
            return [(*line, ("│ ", "frame"), *runs) if runs else line]
    raise AssertionError("the shortest is one of them")


def _worst_in_short(frame: Frame) -> Line:
    """Return how long the longest stall in memory was, to be shown behind the last stall."""
    stall = other_worst(frame)
    if stall is None:
        return ()
    how_long = fmt.with_ms(stall.ns / 1e6)
    return (
        ("; ", "text"),
        ("worst ", "muted"),
        (how_long, "breach"),
        (f" ({frame.key('worst')})", "muted"),
    )


def _percentiles(name: str, values: Series, bound: float | None) -> Line:
    line: list[Run] = [(f" {name} ", "muted")]
    for value in (values.p50_ms, values.p95_ms, values.p99_ms):
        line += [*_value(value, bound, 0), (" ", "text")]
    return tuple(line)


def _row(name: str, values: Series, bound: float | None, trend_width: int) -> Line:
    line: list[Run] = [spot("latency", name.lower()), (f" {name:<5}", "text")]
    for value in (values.p50_ms, values.p95_ms, values.p99_ms):
        line += _value(value, bound, 6)
    line.append((" ", "text"))
    if bound is None:
        line.append((" " * 13, "text"))
    elif values.within_slo is None:
        line.append((f"<{bound:<5g}       ", "muted"))
    else:
        # Never round up to 100 %: that would hide a breach.
        kept = f"{min(values.within_slo, 0.999 if values.within_slo < 1 else 1.0):.1%}"
        good = values.within_slo >= _GOOD_SHARE
        line += [(f"<{bound:<5g}", "muted"), (f"{kept:>6} ", "good" if good else "breach")]
    line.append((sparkline(values.trend_ms, trend_width), "decode"))
    return tuple(line)


def _value(value: float | None, bound: float | None, width: int) -> list[Run]:
    text = fmt.milliseconds(value)
    if bound is not None and value is not None and value > bound:
        return [(f"{text:>{width}}!" if width else f"{text}!", "breach")]
    return [(f"{text:>{width}} " if width else text, "text")]


def sparkline(values: tuple[float | None, ...], width: int) -> str:
    """Return a cell, never full, for the largest value of each slice, on the scale of all."""
    if width <= 0 or not values:
        return ""
    slices: list[float | None] = []
    for x in range(min(width, len(values))):
        first = x * len(values) // min(width, len(values))
        last = (x + 1) * len(values) // min(width, len(values))
        known = [value for value in values[first:last] if value is not None]
        slices.append(max(known, default=None))
    top = max((value for value in slices if value is not None), default=0.0)
    if top <= 0:
        return " " * len(slices)
    return "".join(
        " " if value is None else LEVELS[min(6, int(value / top * 6.999))] for value in slices
    )


def _wall(frame: Frame, width: int) -> Line:
    rates = frame.rates
    line: list[Run] = [(" wall ", "muted")]
    model, device = rates.model_share, rates.device_share
    shares = [("model", model)]
    if model is not None and device is not None:
        shares = [("gpu", device), ("host", max(0.0, model - device))]
    for name, share in (*shares, ("sched", rates.schedule_share), ("idle", rates.idle_share)):
        line += [(f"{name} ", "muted"), (f"{fmt.percent(share)}  ", "text")]
    mixed = fmt.percent(rates.mixed_share)
    name = "mixed steps " if length_of(line) + 12 + len(mixed) <= width else "mixed "
    return (*line, (name, "muted"), (mixed, "text"))


def _goodput(frame: Frame) -> Line:
    """Return the share of finished requests that kept all service levels, and their rate."""
    share, rate = frame.goodput.share, frame.goodput.per_s
    if share is None or rate is None:
        return ()
    below = "breach" if frame.goodput.is_low else "caution"
    style = "good" if share >= _GOOD_SHARE else below
    return (("goodput ", "muted"), (f"{share:.0%} ", style), (f"{rate:.1f} req/s", "text"))


def _stall(frame: Frame, width: int) -> list[Line]:
    worst = _worst(frame, width)
    last = _last_stall(frame, width, is_short=bool(worst))
    return [*last, *worst]


def _worst(frame: Frame, width: int) -> list[Line]:
    """Return a line on the longest stall in memory; no line if that is also the last stall."""
    stall = other_worst(frame)
    if stall is None:
        return []
    kind = "" if stall.kind == "ITL" else f"{stall.kind} "
    how_long = f"{kind}{fmt.with_ms(stall.ns / 1e6)}"
    when = f" at {fmt.clock(frame.history.wall_ns(stall.time_ns))}"
    who = f", {request_name(stall.request_id)}"
    if stall.kind == "ITL":
        who = f", {fmt.plural(stall.num_tokens, 'stream')}"
    key = frame.key("worst")
    forms = [
        (" worst in memory: ", f"{when}{who}, step {stall.step:,}", f" ({key} goes there)"),
        (" worst in memory: ", f"{when}{who}", f" ({key} goes there)"),
        (" worst: ", f"{when}{who}", f" ({key} goes there)"),
        (" worst: ", f"{when}{who}", f" ({key})"),
        (" worst: ", "", f" ({key})"),
    ]
    fits = (form for form in forms if len(how_long) + sum(map(len, form)) <= width + 1)
    before, after, hint = next(fits, forms[-1])
    where = spot("step", stall.step)
    runs: Line = ((before, "muted"), (how_long, "breach"), (after, "text"), (hint, "muted"))
    return [(where, *runs)]


def other_worst(frame: Frame) -> Breach | None:
    """Return the longest stall in memory; None if that is also the last stall."""
    worst = frame.worst.longest[0] if frame.worst.longest else None
    if worst is None or (frame.stall is not None and frame.stall.step == worst.step):
        return None
    return worst


def _last_stall(frame: Frame, width: int, *, is_short: bool) -> list[Line]:
    if frame.stall is None and not frame.tells_requests:
        return [((" last stall: — (the engine does not report its tokens)", "muted"),)]
    if frame.stall is None and frame.history.is_short:
        return [((" last stall: looking further back …", "muted"),)]
    if frame.stall is None:
        return [((" last stall: none above the ITL bound", "muted"),)]
    label, where = " last stall: ", spot("step", frame.stall.step)
    rank = "the worst in memory" if frame.worst.number > 1 else ""
    room = width + 1 - len(label)
    if is_short or len(frame.stall.text) <= room:
        stall = late_text.of_stall(frame.stall, room)
        said = (where, (label, "muted"), (stall, "text"))
        return [said, ((f" it is {rank}", "muted"),)] if rank and not is_short else [said]
    named = f" last stall, {rank}:" if rank else " last stall:"
    stall = late_text.of_stall(frame.stall, width - 1)
    return [(where, (named, "muted")), (where, (f"  {stall}", "text"))]
