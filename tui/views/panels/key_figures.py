"""The key figures at the top of the screen: the figures that an operator reads first, in groups."""

from stepscope.recordings.history.windows import MINUTE_S
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, RATES_WINDOW_S, Frame
from stepscope.tui.views.lines import Line, Run, click, facts, length_of
from stepscope.tui.views.theme import LEVELS

_BAR_WIDTH = 10
_MAIN = 6  # first groups to make room for, by shorter bars
_SEPARATOR: Run = (" │ ", "frame")
_TREND = {1: " ▲", 0: "  ", -1: " ▼"}


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return as many groups of figures as fit into `height` lines, most important first."""
    groups = _drawn_groups(frame, _BAR_WIDTH)
    total = sum(length_of(group) for group in groups[:_MAIN]) + _MAIN * len(_SEPARATOR[0])
    if total > width * height:
        groups = _drawn_groups(frame, max(3, _BAR_WIDTH - (total - width * height)))
    lines: list[Line] = [()]
    for group in groups:
        line = (*lines[-1], _SEPARATOR if lines[-1] else (" ", "text"), *group)
        if length_of(line) <= width:
            lines[-1] = line
        elif len(lines) < height:
            lines.append(((" ", "text"), *group))
        else:
            break
    return lines


def _drawn_groups(frame: Frame, bar_width: int) -> list[Line]:
    groups = _groups(frame, bar_width)
    if frame.is_silent:
        groups = [(do, tuple((text, "muted") for text, _ in group)) for do, group in groups]
    return [click(do, *group) for do, group in groups]


def _groups(frame: Frame, bar_width: int) -> list[tuple[str, Line]]:
    state, latency, rates, slo = frame.state, frame.latency, frame.rates, frame.history.slo
    minute, ten = _cut(frame, LATENCY_WINDOW_S), _cut(frame, RATES_WINDOW_S)
    about = "≈" if frame.is_summed_up and not frame.imported else ""
    is_known = state.is_load_known and not frame.is_silent
    running, waiting = (state.num_running, state.num_waiting) if is_known else ("—", "—")
    trend = (_TREND[frame.waiting_trend if is_known else 0], "caution")
    seats = "" if frame.is_summed_up else f"/{fmt.short(_seats(frame))}"
    preempted = rates.num_preempted
    often = "—  " if preempted is None else _in_a_minute(frame, preempted)
    in_rate = f"{fmt.short(rates.in_tokens_per_s)} tok/s"
    output = _named("out ", ten, f"{fmt.count(rates.output_tokens_per_s)} tok/s")
    limited: Run = ("—", "muted")
    if frame.limits:
        limit, share = max(frame.limits.items(), key=lambda each: each[1])
        what, style = ("none", "text") if limit == "work" else (limit, "caution")
        limited = (f"{what} {share:.0%}", style)
    tax = rates.recompute_tax
    taxed = ("—", "muted") if tax is None else (f"{tax:.1%}", "caution" if tax else "text")
    # p99, because a stall may be one late token among a hundred: p95 would hide it.
    itl = _named(f"ITL p99 {about}", minute, _bounded(latency.itl.p99_ms, slo.itl_ms))
    ttft = _named(f"TTFT p95 {about}", minute, _bounded(latency.ttft.p95_ms, slo.ttft_ms))
    run = facts("RUN ", (f"{running}{seats}", "strong"), "  WAIT ", (f"{waiting}", "strong"), trend)
    return [
        ("budget", _budget(frame, bar_width)),
        ("screen_live", run),
        ("screen_kv", _cache(frame, ten)),
        ("screen_latency", ttft),
        ("screen_latency", itl),
        ("previous_preemption", facts("PREEMPT ", (often, "caution" if preempted else "text"))),
        ("screen_latency", (*output, *facts("  in ", in_rate))),
        ("screen_live", _named("LIMIT ", minute, limited)),
        ("previous_preemption", facts("RECOMPUTE ", taxed)),
    ]


def _cut(frame: Frame, window_s: float) -> str:
    """Return a note on how many seconds of a time window are in memory; empty if all of it is."""
    seconds = frame.cut_s(window_s)
    return "" if seconds is None else f"/{seconds:.{int(seconds < 10)}f}s "


def _named(name: str, cut: str, value: str | Run) -> Line:
    return facts(name.rstrip() if cut else name, (cut, "caution")) + facts("", value)


def _in_a_minute(frame: Frame, number: int) -> str:
    """Return a count per minute ("12/m"), or in the seconds that are known ("3/20s")."""
    seconds = frame.rates.preempted_s
    if not frame.is_whole and not frame.history.is_short:
        cut_s = frame.cut_s(MINUTE_S)
        seconds = MINUTE_S if cut_s is None else cut_s
    is_whole = (frame.is_whole and not number) or seconds >= MINUTE_S - 0.5
    return f"{fmt.short(number)}/m" if is_whole else f"{number}/{seconds:.0f}s"


def _seats(frame: Frame) -> int | None:
    """Return the most requests that may run; of an idle engine, in its next step."""
    summary = frame.summary
    knob = _knob(frame, "max_num_seqs") if summary is None or frame.is_idle else None
    return knob if knob is not None or summary is None else summary.max_num_seqs


def _knob(frame: Frame, name: str) -> int | None:
    value = frame.state.knobs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _budget(frame: Frame, bar_width: int) -> Line:
    """Return how much of the budget the step at the cursor used; while no step runs, the last."""
    summary, knob = frame.summary, _knob(frame, "max_num_batched_tokens")
    if summary is None or summary.token_budget is None:
        has_knob = summary is None and knob is not None
        return facts("BUDGET ", f"—/{knob}" if has_knob else "—")
    spent, budget, style = summary.num_spent_tokens, summary.token_budget, "strong"
    if frame.is_idle:  # no step has used the budget that was set since
        spent, budget = 0, knob or budget
        bar: Line = facts(f"{'idle'[:bar_width]:<{bar_width}}")
    elif frame.is_past:
        style, bar = "muted", facts(f"{'last step' if bar_width > 8 else '':<{bar_width}}")
    else:
        full = round(min(1.0, spent / budget) * bar_width)
        bar = (("█" * full, "prefill"), ("·" * (bar_width - full), "idle"))
    used = (f"{f'{spent}/{budget}':>9} ", style)
    share = (f"{spent / budget:>3.0%} ", "muted" if frame.is_past else "text")
    return (*facts("BUDGET ", used), share, *bar)


def _cache(frame: Frame, cut: str) -> Line:
    hit = _named("hit ", cut, fmt.percent(frame.rates.prefix_hit_rate))
    share = frame.state.kv_share
    if share is None:
        return (*facts("KV ", "— "), *hit)
    level = (LEVELS[min(7, int(share * 8))] + " ", "decode")
    return (*facts("KV ", (f"{share:.0%} ", "strong"), level), *hit)


def _bounded(value: float | None, bound: float) -> Run:
    text = fmt.milliseconds(value)
    text += "ms" if text[-1:].isdigit() else ""
    is_late = value is not None and value > bound
    return (f"{text}!", "breach") if is_late else (text, "text")
