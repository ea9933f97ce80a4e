"""`Verdict`: what an engine is doing, in one sentence, and where the evidence is.

It looks at the last `RECENT_S` seconds up to a step. The first rule that applies speaks: a pause, a
step that runs for long, streams that stood still, a queue, preemptions, service levels.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.history.history_view import HistoryView
from stepscope.recordings.session.waits import Breach
from stepscope.recordings.state.audit_text import seconds_of, work_text
from stepscope.recordings.state.latency import LatencyReport, Series
from stepscope.recordings.state.limits import LIMIT_SPECS
from stepscope.recordings.state.session import SessionState, request_name

RECENT_S = 10.0
_STOOD_STILL = 3.0  # times the median gap: a shorter one is only late
_KEPT = 0.95  # a smaller share within a service level is worth a sentence
_FRESH_NS = 5_000_000_000  # an older stall comes after a queue
_LONG_NS = 500_000_000  # a single stream that stands still so long goes before a queue
_LEAST_S = 3.0  # of steps in memory, before a queue is said to grow
_GROWTH = 4  # requests by which a queue must have grown
_OFTEN = 0.25  # share of steps from which on a limit is named
_MOST_LATE_STEPS = 256  # steps in which stalls are looked for

Tone: TypeAlias = Literal["good", "muted", "caution", "breach"]


class Verdict(NamedTuple):
    tone: Tone
    text: str
    look: str = ""  # id of the dashboard's action that leads to the evidence; empty without one

    @property
    def trouble(self) -> str:
        """The sentence, if it says what is wrong; else empty."""
        return self.text if self.tone in ("breach", "caution") else ""


def verdict_of(history: HistoryView) -> Verdict:
    return verdict_at(history, history.state, None, history.windows.latency())


def verdict_at(
    history: HistoryView, state: SessionState, step: int | None, minute: LatencyReport
) -> Verdict:
    """Judge an engine by its recent steps.

    `minute`: the latencies of the minute up to that step.
    """
    stalls = _stalls(history, state, step, minute.itl)
    recent_ns = state.time_ns - round(RECENT_S * 1e9)
    recent = [each for each in stalls if each.time_ns > recent_ns]
    worst = max(recent, key=lambda each: each.ns, default=None)
    is_wide = (
        worst is not None
        and state.time_ns - worst.time_ns < _FRESH_NS
        and (worst.ns >= _LONG_NS or worst.num_tokens * 2 >= (state.num_running or 0))
    )
    stall = None if worst is None else _stall(history, state, worst, stalls)
    for found in (
        of_now(state),
        stall if is_wide else None,
        _queue(history, state, minute.ttft),
        stall,
        _preemptions(history, state),
        _broken_level(history, minute, state.time_ns),
    ):
        if found is not None:
            return found
    if state.state == "idle" and not state.num_running:
        return Verdict("muted", "idle: there is no request")
    if history.num_steps == 0:
        return Verdict("muted", "no step yet")
    if minute.itl.within_slo is None and minute.ttft.within_slo is None:
        load = f"{state.num_running:,} running, {state.num_waiting:,} waiting: "
        known = load if state.is_load_known else ""
        return Verdict("muted", f"{known}no latency of the last minute is known")
    return Verdict("good", _healthy(state, minute.itl))


def of_now(state: SessionState) -> Verdict | None:
    """Say why the engine takes no work, or for how long it runs a step; None: neither."""
    return _halted(state) or _in_flight(state)


def _halted(state: SessionState) -> Verdict | None:
    if state.state == "stopped":
        return Verdict("caution", "the engine has stopped")
    if state.state == "draining":
        return Verdict("caution", "draining: running requests end, no new one is let in")
    if state.state != "paused":
        return None
    asked = [each for each in state.audit if each.command == "Pause" and not each.code]
    by = f" by {asked[-1].who}" if asked else ""
    since_ns = state.pauses.since_ns
    how_long = "" if since_ns is None else f" for {_seconds(state.time_ns - since_ns)}"
    return Verdict("caution", f"paused{by}{how_long}", "pause_engine")


def _in_flight(state: SessionState) -> Verdict | None:
    flying = state.in_flight
    if flying is None or flying.step <= state.step:
        return None
    text = f"step {flying.step:,} has run for {seconds_of(flying):.1f} s: {work_text(flying)}"
    return Verdict("caution", text, "screen_step")


def _stalls(
    history: HistoryView, state: SessionState, step: int | None, itl: Series
) -> list[Breach]:
    """The gaps between two tokens in the last minute that were late and far longer than most."""
    since_ns, least_ns = state.time_ns - 60_000_000_000, _STOOD_STILL * (itl.p50_ms or 0.0) * 1e6
    return [
        each
        for each in history.windows.breaches(step, _MOST_LATE_STEPS, ("ITL",))
        if each.time_ns > since_ns and each.ns >= least_ns
    ]


def _stall(
    history: HistoryView, state: SessionState, worst: Breach, stalls: Sequence[Breach]
) -> Verdict:
    who = f"{worst.num_tokens} streams" if worst.num_tokens > 1 else request_name(worst.request_id)
    why = _why(history.stall(worst.step), state)
    text = f"{who} stood still {_seconds(worst.ns)} at step {worst.step:,}{why}"
    if len(stalls) > 1:
        first = None if history.first_step is None else history.summary(history.first_step)
        known_s = 60.0 if first is None else (state.time_ns - first.schedule_start_ns) / 1e9
        window = "the last minute" if known_s >= 59.5 else f"{known_s:.0f} s"
        text += f"; {len(stalls):,} stalls in {window}, the last at step {stalls[-1].step:,}"
    longest = history.windows.stalls().longest
    is_worst = bool(longest) and longest[0].step == worst.step
    return Verdict("breach", text, "worst" if is_worst else "goto")  # to the step that it names


def _why(late: Late | None, state: SessionState) -> str:
    main = None if late is None else late.main
    if main is None or main.cause == "unknown":
        return ""
    if late is not None and (main.cause == "preempted" or main.cause == "recompute"):
        why = next((each.detail for each in late.pieces if each.cause == "recompute"), "")
        return f": preempted, {why or 'the KV blocks ran out'}"
    if main.cause == "prefill" and main.request_id is not None:
        prompt = state.requests.get(main.request_id)
        name = request_name(main.request_id)
        if main.num_other_tokens:
            return (
                f" behind {main.num_tokens + main.num_other_tokens:,} prompt tokens, most of {name}"
            )
        if prompt is not None and prompt.num_prompt_tokens == main.num_tokens:
            return f" behind the {main.num_tokens:,}-token prompt of {name}"
        return f" behind {main.num_tokens:,} prompt tokens of {name}"
    return f": {main.short}"


def _queue(history: HistoryView, state: SessionState, ttft: Series) -> Verdict | None:
    """A queue that grows, or that makes first tokens late, and what holds it."""
    if not state.num_waiting:
        return None
    at = history.step_at(state.time_ns - round(RECENT_S * 1e9))
    before = None if at is None else history.summary(at)
    if before is not None and state.time_ns - before.tokens_ns < _LEAST_S * 1e9:
        before = None  # at its start, every engine's queue grows
    was = None if before is None else before.num_waiting
    grows = was is not None and state.num_waiting >= was + max(_GROWTH, was // 4)
    if grows and before is not None:  # and still does: it is not a burst that ebbs away
        half = history.step_at((before.tokens_ns + state.time_ns) // 2)
        middle = None if half is None else history.summary(half)
        grows = middle is None or state.num_waiting > (middle.num_waiting or 0)
    is_late = ttft.within_slo is not None and ttft.within_slo < _KEPT
    if not grows and not is_late:
        return None
    text = f"{state.num_waiting:,} requests wait" if state.num_waiting > 1 else "one request waits"
    if grows and before is not None:
        ago = _seconds(state.time_ns - before.tokens_ns)
        text = f"the queue grows: {state.num_waiting:,} wait, {was:,} did {ago} ago"
    limits = history.windows.sums(state.time_ns, RECENT_S).limits
    held = max(
        (each for each in limits if LIMIT_SPECS[each].bound), key=limits.__getitem__, default=None
    )
    if held is not None and limits[held] >= _OFTEN:
        text += f"; {LIMIT_SPECS[held].bound} in {limits[held]:.0%} of steps"
    return Verdict("breach" if grows and is_late else "caution", text, "screen_step")


def _preemptions(history: HistoryView, state: SessionState) -> Verdict | None:
    sums = history.windows.sums(state.time_ns, RECENT_S)
    number = sums.num_preempted
    if not number:
        return None
    times = "a request was preempted" if number == 1 else f"{number:,} preemptions"
    why = ": the KV blocks run out" if sums.limits.get("kv") else ""
    return Verdict("caution", f"{times} in {RECENT_S:.0f} s{why}", "screen_kv")


def _broken_level(history: HistoryView, minute: LatencyReport, end_ns: int) -> Verdict | None:
    slo = history.slo
    kinds: Sequence[tuple[str, Series, float]] = (
        ("gaps between tokens", minute.itl, slo.itl_ms),
        ("first tokens", minute.ttft, slo.ttft_ms),
    )
    for what, series, bound_ms in kinds:
        if series.within_slo is not None and series.within_slo < _KEPT:
            late = 1 - series.within_slo
            return Verdict(
                "breach", f"{late:.0%} of {what} take over {bound_ms:,g} ms", "screen_latency"
            )
    kept = history.windows.kept(end_ns)
    if kept.is_low:  # few tokens are late, but most requests had one
        text = f"{kept.share or 0:.0%} of requests kept every service level"
        return Verdict("caution", text, "screen_latency")
    return None


def _healthy(state: SessionState, itl: Series) -> str:
    running = state.num_running or 0
    text = f"healthy: {running:,} running" if running else "healthy"
    if itl.within_slo is not None:
        kept = min(itl.within_slo, 0.999 if itl.within_slo < 1 else 1.0)  # never rounded up to all
        text += f", {kept:.1%} of tokens in time"
    return text


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    if 0 < seconds < 0.095:
        return f"{seconds * 1e3:.0f} ms"
    if seconds >= 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
