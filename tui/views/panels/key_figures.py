"""The key figures at the top of the screen: the figures that an operator reads first, in groups."""

from stepscope.recordings.history.windows import MINUTE_S
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, RATES_WINDOW_S, Frame
from stepscope.tui.views.lines import Line, Run, click, length_of
from stepscope.tui.views.theme import LEVELS

_BAR_WIDTH = 10
_MAIN = 6  # first groups to make room for, by shorter bars
_SEPARATOR: Run = (" │ ", "frame")


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return as many groups of figures as fit into `height` lines, most important first."""
    groups = _drawn_groups(frame, _BAR_WIDTH)
    total = sum(length_of(group) for group in groups[:_MAIN]) + _MAIN * len(_SEPARATOR[0])
    if total > width * height:
        groups = _drawn_groups(frame, max(3, _BAR_WIDTH - (total - width * height)))
    lines: list[Line] = []
    line: Line = ((" ", "text"),)
    for group in groups:
        separator = (_SEPARATOR,) if len(line) > 1 else ()
        if length_of((*line, *separator, *group)) > width:
            lines.append(line)
            if len(lines) == height:
                return lines
            line, separator = ((" ", "text"),), ()
        line = (*line, *separator, *group)
    lines.append(line)
    return lines


def _drawn_groups(frame: Frame, bar_width: int) -> list[Line]:
    groups = _groups(frame, bar_width)
    if frame.is_silent:
        groups = [(do, tuple((text, "muted") for text, _ in group)) for do, group in groups]
    return [click(do, *group) for do, group in groups]


def _groups(frame: Frame, bar_width: int) -> list[tuple[str, Line]]:
    state, latency, rates, slo = frame.state, frame.latency, frame.rates, frame.history.slo
    preemptions = rates.num_preempted
    cut = _cut(frame, LATENCY_WINDOW_S)
    about = "≈" if frame.is_summed_up and not frame.imported else ""
    tokens = f"{fmt.count(rates.output_tokens_per_s)} tok/s"
    preempted = "—  " if preemptions is None else _in_a_minute(frame, preemptions)
    ttft = (*_named(f"TTFT p95 {about}", cut), *_bounded(latency.ttft.p95_ms, slo.ttft_ms))
    # p99, because a stall may be one late token among a hundred: p95 would hide it.
    itl = (*_named(f"ITL p99 {about}", cut), *_bounded(latency.itl.p99_ms, slo.itl_ms))
    running: Line = (
        ("RUN ", "muted"),
        (f"{_now(frame, state.num_running)}{_limit_text(frame)}", "strong"),
        ("  WAIT ", "muted"),
        (_now(frame, state.num_waiting), "strong"),
        (_TREND[_trend(frame)], "caution"),
    )
    rate: Line = (
        *_named("out ", _cut(frame, RATES_WINDOW_S)),
        (tokens, "text"),
        ("  in ", "muted"),
        (f"{fmt.short(rates.in_tokens_per_s)} tok/s", "text"),
    )
    preempt: Line = (("PREEMPT ", "muted"), (preempted, "caution" if preemptions else "text"))
    return [
        ("budget", _budget(frame, bar_width)),
        ("screen_live", running),
        ("screen_kv", _cache(frame)),
        ("screen_latency", ttft),
        ("screen_latency", itl),
        ("previous_preemption", preempt),
        ("screen_latency", rate),
        ("screen_live", _limited(frame, cut)),
        ("previous_preemption", _recompute(frame)),
    ]


def _recompute(frame: Frame) -> Line:
    tax = frame.rates.recompute_tax
    if tax is None:
        return (("RECOMPUTE ", "muted"), ("—", "muted"))
    return (("RECOMPUTE ", "muted"), (f"{tax:.1%}", "caution" if tax else "text"))


def _limited(frame: Frame, cut: str) -> Line:
    limits = frame.limits
    if not limits:
        return (*_named("LIMIT ", cut), ("—", "muted"))
    limit = max(limits, key=lambda each: limits[each])
    name, style = ("none", "text") if limit == "work" else (limit, "caution")
    return (*_named("LIMIT ", cut), (f"{name} {limits[limit]:.0%}", style))


def _cut(frame: Frame, window_s: float) -> str:
    """Return a note on how many seconds of a time window are in memory; empty if all of it is."""
    seconds = frame.cut_s(window_s)
    return "" if seconds is None else f"/{seconds:.{int(seconds < 10)}f}s"


def _named(name: str, cut: str) -> Line:
    return ((name, "muted"),) if not cut else ((name.rstrip(), "muted"), (f"{cut} ", "caution"))


def _in_a_minute(frame: Frame, number: int) -> str:
    """Return a count per minute ("12/m"), or in the seconds that are known ("3/20s")."""
    seconds = frame.rates.preempted_s
    if not frame.is_whole and not frame.history.is_short:
        cut_s = frame.cut_s(MINUTE_S)
        seconds = MINUTE_S if cut_s is None else cut_s
    is_whole = (frame.is_whole and not number) or seconds >= MINUTE_S - 0.5
    return f"{fmt.short(number)}/m" if is_whole else f"{number}/{seconds:.0f}s"


def _now(frame: Frame, number: int) -> str:
    """Return a number of requests as text; a dash if the engine is silent or did not publish it."""
    return "—" if frame.is_silent or not frame.state.is_load_known else str(number)


def _trend(frame: Frame) -> int:
    is_known = not frame.is_silent and frame.state.is_load_known
    return frame.waiting_trend if is_known else 0


def _limit_text(frame: Frame) -> str:
    return "" if frame.is_summed_up else f"/{fmt.short(_limit(frame))}"


_TREND = {1: " ▲", 0: "  ", -1: " ▼"}


def _limit(frame: Frame) -> int | None:
    summary = frame.summary
    if summary is None or frame.is_idle:
        knob = _knob(frame, "max_num_seqs")
        return knob if knob is not None or summary is None else summary.max_num_seqs
    return summary.max_num_seqs


def _knob(frame: Frame, name: str) -> int | None:
    """Return the value that an int knob has for the next step; None if unknown."""
    value = frame.state.knobs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _budget(frame: Frame, bar_width: int) -> Line:
    summary = frame.summary
    if summary is None and (budget := _knob(frame, "max_num_batched_tokens")) is not None:
        return (("BUDGET ", "muted"), (f"—/{budget}", "text"))
    if summary is None or summary.token_budget is None:
        return (("BUDGET ", "muted"), ("—", "text"))
    spent, budget = summary.num_spent_tokens, summary.token_budget
    if frame.is_idle or frame.is_past:
        return _budget_of_last(frame, spent, budget, bar_width)
    full = round(min(1.0, spent / budget) * bar_width)
    return (
        ("BUDGET ", "muted"),
        (f"{f'{spent}/{budget}':>9} ", "strong"),
        (f"{spent / budget:>3.0%} ", "text"),
        ("█" * full, "prefill"),
        ("·" * (bar_width - full), "idle"),
    )


def _budget_of_last(frame: Frame, spent: int, budget: int, bar_width: int) -> Line:
    """Return how much of the budget is used while no step runs: 0, or by the last step."""
    now, words = (0, ("idle",)) if frame.is_idle else (spent, ("last step", "last"))
    if frame.is_idle:  # no step has used the budget that was set since
        budget = _knob(frame, "max_num_batched_tokens") or budget
    style = "strong" if frame.is_idle else "muted"
    word = next((word for word in words if len(word) <= bar_width), "")
    return (
        ("BUDGET ", "muted"),
        (f"{f'{now}/{budget}':>9} ", style),
        (f"{now / budget:>3.0%} ", style),
        (f"{word:<{bar_width}}", "muted"),
    )


def _cache(frame: Frame) -> Line:
    hit = (
        *_named("hit ", _cut(frame, RATES_WINDOW_S)),
        (fmt.percent(frame.rates.prefix_hit_rate), "text"),
    )
    share = frame.state.kv_share
    if share is None:
        return (("KV ", "muted"), ("— ", "text"), *hit)
    return (
        ("KV ", "muted"),
        (f"{share:.0%} ", "strong"),
        (LEVELS[min(7, int(share * 8))] + " ", "decode"),
        *hit,
    )


def _bounded(value: float | None, bound: float) -> Line:
    text = fmt.milliseconds(value)
    if text[-1:].isdigit():
        text += "ms"
    breach = value is not None and value > bound
    return ((text + "!", "breach") if breach else (text, "text"),)
