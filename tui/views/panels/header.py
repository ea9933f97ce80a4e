"""The header line: which session is shown, its state and rates, and whether it is recorded."""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.state.audit_text import seconds_of, work_text
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import (
    Field,
    Line,
    Run,
    clean,
    click,
    facts,
    length_of,
    spread,
    whole,
)

_OLD_S = 6.0  # what was judged is no longer news


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the header shows about the source of the session and does not find in the history."""

    title: str
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
    is_paused = not frame.view.live
    wall_ns = frame.wall_ns(frame.cursor)
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
    fields = [
        Field(1, ((f" {clean(connection.title, 24)} ", "strong"),)),
        Field(0, click("pause", now)),
        *([] if frame.is_replay else when),
    ]
    if meanwhile := _meanwhile(frame, connection):
        fields.append(Field(0, ((f" engine {meanwhile} by now ", "caution"),)))
    elif state in ("paused", "draining", "stopped") and f"engine {state}" not in now[0]:
        fields.append(Field(0, ((f" engine {state} ", "caution"),)))
    fields.append(Field(1, ((_place(frame, connection), "text"),)))
    fields += when if frame.is_replay else []
    if frame.state.leased is not None:
        fields.append(Field(0, ((" AUTOPILOT ", "mark"),)))
    if info is not None:
        if info.simulated is not None:
            fields.append(Field(0, ((f" {SIMULATED} ", "caution"),)))
        fields.append(Field(0, (_role(info),)))
        if info.with_tokens:
            fields.append(Field(0, ((" with tokens ", "caution"),)))
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
    """Return the role of an engine that does only prefill or only decode; else nothing."""
    if info.role == "prefill" and info.engine is not None:
        return " prefill ", "prefill"
    if info.role == "prefill" and info.decode_engine is None:
        return " prefill, NO DECODE ENGINE: runs the decodes itself ", "caution"
    if info.role == "prefill":
        return f" prefill → {clean(info.decode_engine or '', 24)} ", "prefill"
    return ("", "text") if info.role is None else (f" {clean(info.role, 24)} ", "decode")


def _step(frame: Frame) -> Line:
    """Return the number of the step at the cursor, or of the step in flight if that takes long."""
    flying, last = frame.in_flight, frame.state.in_flight
    if flying is not None:
        text = f"  STEP {flying.step:,} IN FLIGHT {seconds_of(flying):,.1f} s"
        return ((text, "caution"), (f": {work_text(flying)}", "text"))
    unit = "  record " if frame.is_summed_up else "  step "
    number = facts(unit, (fmt.count(frame.step), "strong"))
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
        return f"{frame.rates.steps_per_s or 0:.1f}"
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
    verdict = frame.verdict
    hint = f" ({frame.key(verdict.look)})" if verdict.look else ""
    said, room = f" {verdict.text}", max(1, width - len(hint))
    if len(said) > room:  # how often it was comes last
        said = said.rpartition("; ")[0] or said
    line: Line = ((clean(said, room), verdict.tone), (hint, "muted"))
    return [click(verdict.look, *line) if verdict.look else line]
