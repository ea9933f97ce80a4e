"""The header line: which session is shown, its state and rates, and whether it is recorded."""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.state.audit_text import seconds_of, work_text
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Field, Line, Run, clean, click, length_of, spread, whole
from stepscope.tui.views.panels.latency_panel import sparkline


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


def _when(frame: Frame, connection: SourceState) -> list[tuple[int, Line]]:
    """Return when the step at the cursor ran, and how far it is behind the newest step."""
    is_paused = not frame.view.live
    if frame.cursor is None or not (is_paused or frame.is_replay):
        return []
    wall_ns = frame.wall_ns(frame.cursor)
    if wall_ns is None and not is_paused:
        return []
    moment = fmt.moment(wall_ns, with_tenths=connection.status != "playing" or is_paused)
    shown: list[tuple[int, Line]] = [(0, ((f" {moment}", "strong"),))]
    newest = None if frame.last_step is None else frame.history.summary(frame.last_step)
    if frame.is_replay or newest is None or frame.summary is None:
        return shown
    behind = newest.step - frame.summary.step
    if behind:
        back_s = (newest.tokens_ns - frame.summary.tokens_ns) / 1e9
        shown.append((1, ((f", {fmt.span(back_s)} back", "text"),)))
        shown.append((3, ((f" ({fmt.plural(behind, 'step')})", "muted"),)))
    return shown


def _place(frame: Frame, connection: SourceState) -> str | None:
    """Return the position of the cursor in a replayed file, and the length of the file."""
    wall_ns = frame.wall_ns(frame.cursor)
    if connection.file_ns is None or wall_ns is None:
        return None
    begin_ns, end_ns = connection.file_ns
    length_s = (end_ns - begin_ns) / 1e9
    return f"{_minutes(min(max((wall_ns - begin_ns) / 1e9, 0), length_s))} of {_minutes(length_s)}"


def draw(frame: Frame, connection: SourceState, width: int) -> list[Line]:
    info = frame.state.info
    parts: list[tuple[int, Line]] = [
        (1, ((f" {clean(connection.title, 24)} ", "strong"),)),
        (0, click("pause", badge(frame, connection))),
    ]
    if not frame.is_replay:
        parts += _when(frame, connection)
    state = frame.state.state
    is_said = f"engine {state}" in badge(frame, connection)[0]
    if (meanwhile := _meanwhile(frame, connection)) is not None:
        parts.append((0, ((f" engine {meanwhile} by now ", "caution"),)))
    elif state in ("paused", "draining", "stopped") and not is_said:
        parts.append((0, ((f" engine {state} ", "caution"),)))
    if (place := _place(frame, connection)) is not None:
        parts.append((1, ((f" {place} ", "text"),)))
    if frame.is_replay:
        parts += _when(frame, connection)
    if frame.state.leased is not None:
        parts.append((0, ((" AUTOPILOT ", "mark"),)))
    if info is not None and info.simulated is not None:
        parts.append((0, ((f" {SIMULATED} ", "caution"),)))
    if info is not None and (role := _role(info)) is not None:
        parts.append((0, (role,)))
    if info is not None and info.with_tokens:
        parts.append((0, ((" with tokens ", "caution"),)))
    if info is not None:
        parts.append((2, ((f" {clean(info.model, 40)}", "text"),)))
    parts.append((4, ((f"  {clean(connection.endpoint, 40)}", "muted"),)))
    parts.append((0, _step(frame)))
    parts.append((2, ((f"  {_rate(frame, connection)} steps/s", "text"),)))
    parts += _output(frame)
    lost = frame.history.num_lost
    parts.append((3, (("  gap ", "muted"), (f"{lost:,}", "caution" if lost else "text"))))
    if connection.recording is not None:
        seconds, num_bytes = connection.recording
        is_fed = connection.status in ("live", "stale")
        clock: Run = (_minutes(seconds), "text") if is_fed else ("waits", "caution")
        parts.append((1, (("  ● REC ", "mark"), clock, (f" {fmt.size(num_bytes)}", "text"))))
    right: Line = ((f"{connection.fps:g}fps ", "muted"),)
    fields = [Field(rank, line) for rank, line in parts]
    return [spread(whole(fields, width - length_of(right) - 1), right, width)]


def _role(info: EngineInfo) -> Run | None:
    """Return the role of an engine that does only prefill or only decode; else None."""
    if info.role == "prefill" and info.engine is not None:
        return " prefill ", "prefill"
    if info.role == "prefill" and info.decode_engine is None:
        return " prefill, NO DECODE ENGINE: runs the decodes itself ", "caution"
    if info.role == "prefill":
        return f" prefill → {clean(info.decode_engine or '', 24)} ", "prefill"
    return None if info.role is None else (f" {clean(info.role, 24)} ", "decode")


def _step(frame: Frame) -> Line:
    """Return the number of the step at the cursor, or of the step in flight if that takes long."""
    flying = frame.in_flight
    if flying is not None:
        text = f"  STEP {flying.step:,} IN FLIGHT {seconds_of(flying):,.1f} s"
        return ((text, "caution"), (f": {work_text(flying)}", "text"))
    unit = "  record " if frame.is_summed_up else "  step "
    number: Line = ((unit, "muted"), (fmt.count(frame.step), "strong"))
    last = frame.state.in_flight
    if last is None or not frame.is_silent:
        return number
    text = f"  silent since {seconds_of(last):,.1f} s into step {last.step:,}"
    return (*number, (text, "caution"))


def _meanwhile(frame: Frame, connection: SourceState) -> str | None:
    """Return why the engine does not run now, while the picture shows an earlier step, or None."""
    if frame.view.live or frame.is_replay or connection.is_previous:
        return None
    if connection.status in ("stale", "down", "starting"):
        return connection.status
    now, then = frame.history.state.state, frame.state.state
    return "paused" if now == "paused" and then != "paused" else None


def _rate(frame: Frame, connection: SourceState) -> str:
    """Return the steps per second at the cursor; a dash if the engine is silent or paused."""
    silent = connection.status in ("stale", "down", "starting") or frame.state.state == "paused"
    if frame.view.live and silent:
        return "—"
    if frame.is_summed_up:
        return _steps_in_record(frame)
    return f"{frame.rates.steps_per_s or 0:.1f}"


def _output(frame: Frame) -> list[tuple[int, Line]]:
    rate = frame.rates.output_tokens_per_s
    if rate is None or frame.is_past:
        return []
    said: Line = (("  out ", "muted"), (f"{fmt.count(round(rate))} tok/s", "text"))
    trend = sparkline(frame.output_trend, len(frame.output_trend))
    return [(4, (*said, (f" {trend}", "decode")))]


def _steps_in_record(frame: Frame) -> str:
    """Return the steps per second that the engine itself counted, from the record at the cursor."""
    summary, totals = frame.summary, frame.state.totals
    if summary is None or totals is None or totals.num_steps is None:
        return "—"
    seconds = (summary.tokens_ns - summary.schedule_start_ns) / 1e9
    return f"{totals.num_steps / seconds:.1f}" if seconds > 0 else "—"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


_OLD_S = 6.0  # what was judged is no longer news


def verdict(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    if frame.view.live and frame.status in ("starting", "connecting"):
        return [((" waiting for the engine", "muted"),)]
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
    text = clean(said, room)
    line: Line = ((text, verdict.tone), (hint, "muted"))
    return [click(verdict.look, *line) if verdict.look else line]
