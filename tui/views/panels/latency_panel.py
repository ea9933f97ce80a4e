"""Latencies of the last minute against the service levels, the last stall and the worst one."""

from stepscope.recordings.session.late_waits import Breach
from stepscope.recordings.state.series.latency import TREND_BUCKETS, Series
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, OLD_S, Frame
from stepscope.tui.views.framed_panels import sparkline
from stepscope.tui.views.lines import Line, Run, facts, first_fitting, framed, length_of, spot

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
    ttft, itl = _percentiles(report.ttft, slo.ttft_ms, 0), _percentiles(report.itl, slo.itl_ms, 0)
    line = (*cut, *facts(" TTFT "), *ttft, *facts(" ITL "), *itl)
    stall = frame.stall
    said = "" if stall is None else late_text.of_stall(stall, width - length_of(line) - 2)
    return [(*line, ("│ ", "frame"), (said, "text")) if said else line]


def _percentiles(values: Series, bound: float | None, width: int) -> list[Run]:
    runs: list[Run] = []
    for value in (values.p50_ms, values.p95_ms, values.p99_ms):
        is_late = bound is not None and value is not None and value > bound
        text = f"{fmt.milliseconds(value):>{width}}{'!' if is_late else ' ' * (width > 0)}"
        runs.append((text if width else f"{text} ", "breach" if is_late else "text"))
    return runs


def _row(name: str, values: Series, bound: float | None, trend_width: int) -> Line:
    line: list[Run] = [spot("latency", name.lower()), (f" {name:<5}", "text")]
    line += [*_percentiles(values, bound, 6), (" ", "text")]
    if bound is None:
        line.append((" " * 13, "text"))
    elif values.within_slo is None:
        line.append((f"<{bound:<5g}       ", "muted"))
    else:
        kept, good = fmt.exact_percent(values.within_slo), values.within_slo >= _GOOD_SHARE
        line += [(f"<{bound:<5g}", "muted"), (f"{kept:>6} ", "good" if good else "breach")]
    return (*line, (sparkline(values.trend_ms, trend_width), "decode"))


def _wall(frame: Frame, width: int) -> Line:
    rates = frame.rates
    model, device = rates.model_share, rates.device_share
    shares = {"model": model}
    if model is not None and device is not None:
        shares = {"gpu": device, "host": max(0.0, model - device)}
    shares |= {"sched": rates.schedule_share, "idle": rates.idle_share}
    line = facts(" wall ")
    for name, share in shares.items():
        line += facts(f"{name} ", f"{fmt.percent(share)}  ")
    mixed = fmt.percent(rates.mixed_share)
    forms = [(*line, *facts(name, mixed)) for name in ("mixed steps ", "mixed ")]
    return first_fitting(forms, width)


def goodput(frame: Frame) -> Line:
    share, rate = frame.goodput.share, frame.goodput.per_s
    if share is None or rate is None:
        return ()
    below = "breach" if frame.goodput.is_low else "caution"
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
    worst, key = _other_worst(frame), frame.key("worst")
    if worst is None:
        is_worst = frame.stall is not None and frame.worst.number > 1
        return [*lines, facts(" it is the worst in memory")] if is_worst else lines
    kind = "" if worst.kind == "ITL" else f"{worst.kind} "
    how_long = (f"{kind}{fmt.with_ms(worst.ns / 1e6)}", "breach")
    who = request_name(worst.request_id)
    if worst.kind == "ITL":
        who = fmt.plural(worst.num_tokens, "stream")
    when = f" at {fmt.clock(frame.history.wall_ns(worst.time_ns))}, {who}"
    full = facts(" worst in memory: ", how_long, (when, "text"), f", step {worst.step:,}")
    forms = [(*full, *facts(f" ({key} goes there)"))]
    forms.append(facts(" worst: ", how_long, (when, "muted"), (f" ({key})", "muted")))
    return [*lines, (spot("step", worst.step), *first_fitting(forms, width))]


def _other_worst(frame: Frame) -> Breach | None:
    """Return the longest stall in memory; None if that is also the last stall."""
    worst = frame.worst.longest[0] if frame.worst.longest else None
    is_last = worst is not None and frame.stall is not None and frame.stall.step == worst.step
    return None if is_last else worst
