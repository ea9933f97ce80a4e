"""The top of the screen: the header line, the verdict, and the figures that one reads first.

The header line says which session is shown, its state and rates, and whether it is recorded.
"""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.history.verdict import of_now
from stepscope.recordings.session.sums import per
from stepscope.recordings.state.audit_text import seconds_of, work_text
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, RATES_WINDOW_S, Frame
from stepscope.tui.views.lines import (
    Field,
    Line,
    Run,
    bounded,
    clean,
    click,
    facts,
    length_of,
    spread,
    whole,
)
from stepscope.tui.views.theme import LEVELS

_OLD_S = 6.0  # what was judged is no longer news
TITLE: Run = (" stepscope ", "strong")
_BAR_WIDTH = 10
_MAIN = 6  # first groups to make room for, by shorter bars
_SEPARATOR: Run = (" │ ", "frame")
_TREND = {1: " ▲", 0: "  ", -1: " ▼"}


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the header shows about the source of the session and does not find in the history."""

    endpoint: str
    status: SourceStatus
    fps: float
    speed: float | None = None  # of a replay
    recording: tuple[float, int] | None = None  # seconds and bytes so far; None if none runs
    is_previous: bool = False  # the session is the one from before the engine restarted
    file_ns: tuple[int, int] | None = None  # wall time of the first and last step of a replay


def badge(frame: Frame, connection: SourceState) -> Run:
    """Return the state of the picture as a badge; it is never "live" if the data is stale."""
    status = connection.status
    if connection.is_previous:
        return "▐BEFORE THE RESTART▌", "badge_paused"
    if frame.is_replay and (status == "paused" or not frame.view.live):
        is_end = frame.extent is not None and frame.cursor == frame.extent[1]
        return ("▐REPLAY END▌", "badge_replay") if is_end else ("▐REPLAY PAUSED▌", "badge_paused")
    if not frame.view.live:
        return "▐PAUSED▌", "badge_paused"
    if status in ("stale", "down", "starting", "connecting"):
        return f"▐{status.upper()}▌", "badge_down" if status == "down" else "badge_paused"
    if status == "live" and frame.state.state == "paused":
        return "▐LIVE engine paused▌", "badge_paused"
    if frame.is_behind:
        return f"▐LIVE {fmt.span(frame.behind_s)} behind▌", "badge_paused"
    if status == "live":
        return ("▐LIVE idle▌" if frame.is_idle else "▐LIVE▌"), "badge_live"
    if status == "ended":
        return f"▐{'REPLAY' if frame.is_replay else 'LOG'} END▌", "badge_replay"
    return f"▐REPLAY {connection.speed or 1:g}x▌", "badge_replay"


def _when(frame: Frame, connection: SourceState) -> list[Field]:
    is_paused, wall_ns = not frame.view.live, frame.wall_ns(frame.cursor)
    if frame.cursor is None or not (is_paused or (frame.is_replay and wall_ns is not None)):
        return []
    moment = fmt.moment(wall_ns, with_tenths=connection.status != "playing" or is_paused)
    shown = [Field(0, ((f" {moment}", "strong"),))]
    newest = None if frame.last_step is None else frame.history.summary(frame.last_step)
    if frame.is_replay or newest is None or frame.summary is None:
        return shown
    if behind := newest.step - frame.summary.step:
        back_s = (newest.tokens_ns - frame.summary.tokens_ns) / 1e9
        shown.append(Field(1, ((f", {fmt.span(back_s)} back", "text"),)))
        shown.append(Field(3, facts(f" ({fmt.plural(behind, 'step')})")))
    return shown


def _place(frame: Frame, connection: SourceState) -> str:
    wall_ns = frame.wall_ns(frame.cursor)
    if connection.file_ns is None or wall_ns is None:
        return ""
    begin_ns, end_ns = connection.file_ns
    length_s = (end_ns - begin_ns) / 1e9
    at_s = min(max((wall_ns - begin_ns) / 1e9, 0), length_s)
    return f" {_minutes(at_s)} of {_minutes(length_s)} "


def draw(frame: Frame, connection: SourceState, width: int) -> list[Line]:
    info, state, lost = frame.state.info, frame.state.state, frame.history.num_lost
    now = badge(frame, connection)
    when = _when(frame, connection)
    rate = f"  {_rate(frame, connection)} steps/s"
    fields = [Field(1, (TITLE,)), Field(0, click("pause", now)), *([] if frame.is_replay else when)]
    stands, autopilot = "", "" if frame.state.leased is None else " AUTOPILOT "
    if meanwhile := _meanwhile(frame, connection):
        stands = f" engine {meanwhile} by now "
    elif state in ("paused", "draining", "stopped") and f"engine {state}" not in now[0]:
        stands = f" engine {state} "
    fields.append(Field(0, ((stands, "caution"),)))
    fields.append(Field(1, ((_place(frame, connection), "text"),)))
    fields += when if frame.is_replay else []
    fields.append(Field(0, ((autopilot, "mark"),)))
    if info is not None:
        simulated = "" if info.simulated is None else f" {SIMULATED} "
        tokens = " with tokens " if info.with_tokens else ""
        fields.append(Field(0, ((simulated, "caution"), _role(info), (tokens, "caution"))))
        fields.append(Field(2, ((f" {clean(info.model, 40)}", "text"),)))
    fields += [
        Field(4, facts(f"  {clean(connection.endpoint, 40)}")),
        Field(0, _step(frame)),
        Field(2, ((rate, "text"),)),
        Field(3, facts("  gap ", (f"{lost:,}", "caution" if lost else "text"))),
    ]
    if connection.recording is not None:
        seconds, num_bytes = connection.recording
        is_fed = connection.status in ("live", "stale")
        clock: Run = (_minutes(seconds), "text") if is_fed else ("waits", "caution")
        fields.append(Field(1, (("  ● REC ", "mark"), clock, (f" {fmt.size(num_bytes)}", "text"))))
    right = facts(f"{connection.fps:g}fps ")
    return [spread(whole(fields, width - length_of(right) - 1), right, width)]


def _role(info: EngineInfo) -> Run:
    if info.role != "prefill":
        return f" {clean(info.role, 24)} " if info.role else "", "decode"
    if info.engine is not None:
        return " prefill ", "prefill"
    if info.decode_engine is None:
        return " prefill, NO DECODE ENGINE: runs the decodes itself ", "caution"
    return f" prefill → {clean(info.decode_engine, 24)} ", "prefill"


def _step(frame: Frame) -> Line:
    """Return the number of the step at the cursor, or of the step in flight if that takes long."""
    flying, last = frame.in_flight, frame.state.in_flight
    if flying is not None:
        text = f"  STEP {flying.step:,} IN FLIGHT {seconds_of(flying):,.1f} s"
        return ((text, "caution"), (f": {work_text(flying)}", "text"))
    number = facts(f"  {frame.unit} ", (fmt.count(frame.step), "strong"))
    if last is None or not frame.is_silent:
        return number
    text = f"  silent since {seconds_of(last):,.1f} s into step {last.step:,}"
    return (*number, (text, "caution"))


def _meanwhile(frame: Frame, connection: SourceState) -> str:
    """Return why the engine does not run now, while the picture shows an earlier step."""
    if frame.view.live or frame.is_replay or connection.is_previous:
        return ""
    if connection.status in ("stale", "down", "starting"):
        return connection.status
    now, then = frame.history.state.state, frame.state.state
    return "paused" if now == "paused" and then != "paused" else ""


def _rate(frame: Frame, connection: SourceState) -> str:
    silent = connection.status in ("stale", "down", "starting") or frame.state.state == "paused"
    if frame.view.live and silent:
        return "—"
    if not frame.is_summed_up:
        return f"{frame.recent.steps_per_s or 0:.1f}"
    summary, totals = frame.summary, frame.state.totals
    if summary is None or totals is None or totals.num_steps is None:
        return "—"
    seconds = (summary.tokens_ns - summary.schedule_start_ns) / 1e9
    return f"{totals.num_steps / seconds:.1f}" if seconds > 0 else "—"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def verdict(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    if frame.view.live and frame.status in ("starting", "connecting"):
        return [facts(" waiting for the engine")]
    if frame.is_silent:
        what = "has stopped" if frame.state.state == "stopped" else "does not answer"
        said = f" the engine {what}: the figures are {fmt.span(frame.age_s)} old"
        return [((clean(said, width), "breach"),)]
    old_s = frame.figures_age_s + (frame.behind_s if frame.is_behind else 0.0)
    if old_s >= _OLD_S and frame.view.live and not frame.is_replay:
        why = "the engine's messages come late" if frame.is_behind else "they take long to compute"
        return [((clean(f" figures are {fmt.span(old_s)} old: {why}", width), "caution"),)]
    now = of_now(frame.state) if frame.in_flight is not None else None
    verdict = now or frame.verdict  # for how long it runs is in the header too
    hint = f" ({frame.key(verdict.look)})" if verdict.look else ""
    said, room = f" {verdict.text}", max(1, width - len(hint))
    if len(said) > room:  # how often it was comes last
        said = said.rpartition("; ")[0] or said
    line: Line = ((clean(said, room), verdict.tone), (hint, "muted"))
    return [click(verdict.look, *line) if verdict.look else line]


def key_figures(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
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
    state, latency, recent, slo = frame.state, frame.latency, frame.recent, frame.history.slo
    minute, ten = _cut(frame, LATENCY_WINDOW_S), _cut(frame, RATES_WINDOW_S)
    about = "≈" if frame.is_summed_up and not frame.imported else ""
    is_known = state.is_load_known and not frame.is_silent
    running, waiting = (state.num_running, state.num_waiting) if is_known else ("—", "—")
    trend = (_TREND[frame.waiting_trend if is_known and state.num_waiting else 0], "caution")
    seats = "" if frame.is_summed_up else f"/{fmt.short(_seats(frame))}"
    preempted = None if frame.first_step is None else frame.minute.num_preempted
    often = "—  " if preempted is None else _in_a_minute(frame, preempted)
    num_in = recent.num_in_tokens
    if num_in is None and not frame.is_summed_up:
        num_in = recent.num_prefill_tokens
    in_rate = f"{fmt.short(per(num_in, recent.seconds))} tok/s"
    output = _named("out ", ten, f"{fmt.count(recent.out_tokens_per_s)} tok/s")
    limited: Run = ("—", "muted")
    if frame.limits:
        limit, share = max(frame.limits.items(), key=lambda each: each[1])
        what, style = ("none", "text") if limit == "work" else (limit, "caution")
        limited = (f"{what} {share:.0%}", style)
    tax = per(frame.minute.recompute_ns, frame.minute.busy_ns)
    taxed = ("—", "muted") if tax is None else (f"{tax:.1%}", "caution" if tax else "text")
    # p99, because a stall may be one late token among a hundred: p95 would hide it.
    late_itl, late_ttft = latency.itl.p99_ms, latency.ttft.p95_ms
    itl = bounded(fmt.with_ms(late_itl).replace(" ", ""), late_itl, slo.itl_ms)
    ttft = bounded(fmt.with_ms(late_ttft).replace(" ", ""), late_ttft, slo.ttft_ms)
    run = facts("RUN ", (f"{running}{seats}", "strong"), "  WAIT ", (f"{waiting}", "strong"), trend)
    return [
        ("budget", _budget(frame, bar_width)),
        ("screen_live", run),
        ("screen_kv", _cache(frame, ten)),
        ("screen_latency", _named(f"TTFT p95 {about}", minute, ttft)),
        ("screen_latency", _named(f"ITL p99 {about}", minute, itl)),
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
    seconds = frame.known_s(LATENCY_WINDOW_S)
    if not frame.is_whole and not frame.history.is_short:
        cut_s = frame.cut_s(LATENCY_WINDOW_S)
        seconds = LATENCY_WINDOW_S if cut_s is None else cut_s
    is_whole = (frame.is_whole and not number) or seconds >= LATENCY_WINDOW_S - 0.5
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
    if summary is None or not summary.token_budget:
        has_knob = summary is None and knob is not None
        return facts("BUDGET ", f"—/{knob}" if has_knob else "—")
    spent, budget, style = summary.num_spent_tokens, summary.token_budget, "strong"
    if frame.is_idle:  # no step has used the budget that was set since
        spent, budget = 0, knob or budget
        bar: Line = facts(f"{'idle'[:bar_width]:<{bar_width}}")
    elif frame.is_past:
        last = fmt.first_fitting(("last step", "last", ""), bar_width)
        style, bar = "muted", facts(f"{last:<{bar_width}}")
    else:
        full = round(max(0.0, min(1.0, spent / budget)) * bar_width)
        bar = (("█" * full, "prefill"), ("·" * (bar_width - full), "idle"))
    used = (f"{spent:>{len(str(budget))}}/{budget} ", style)  # as wide in each step
    share = (f"{spent / budget:>4.0%} ", "muted" if frame.is_past else "text")
    return (*facts("BUDGET ", used), share, *bar)


def _cache(frame: Frame, cut: str) -> Line:
    hit = _named("hit ", cut, fmt.percent(frame.recent.prefix_hit_rate))
    share = frame.state.kv_share
    if share is None:
        return (*facts("KV ", "— "), *hit)
    level = (LEVELS[min(7, int(share * 8))] + " ", "decode")
    return (*facts("KV ", (f"{share:.0%} ", "strong"), level), *hit)
