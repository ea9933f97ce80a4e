"""Opens the dashboard, also for other commands: `replay` on a recording; `screenshot` draws it."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings import samples
from stepscope.recordings.file.incident import incident_in, incidents_in
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import LEVEL_NAMES
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import MAX_BYTES, MAX_STEPS, History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.replay.playhead import MAX_SPEED, MIN_SPEED
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.tui.cli.shared.arguments import (
    find_recording,
    picture_path,
    picture_size,
    request_number,
)  # fmt: skip
from stepscope.tui.cli.shared.levels import judged_as, own_levels
from stepscope.tui.cli.shared.options import RecordingFile, command, option
from stepscope.tui.cli.shared.output import note, say
from stepscope.tui.cli.shared.process import running
from stepscope.tui.session.live_source import LiveSource, control_of
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import (
    DashboardSettings,
    config_path,
    load_actions,
    load_alerts,
)
from stepscope.tui.settings.terminal import cannot_be_drawn_on, no_terminal
from stepscope.tui.views.format import file_size
from stepscope.tui.views.view import ZOOMS

_DRAWN = ("theme", "ascii", "fps", "sort", "axis")


def new_history(
    settings: DashboardSettings, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
) -> History:
    return History(own_levels(settings), max_steps, max_bytes)


def recording_settings(recording: Recording, flags: Mapping[str, Any]) -> DashboardSettings:
    """Return how to show a recording: by its service levels, and by time if it is about time."""
    shipped, incident = samples.shipped(), incident_in(recording.metadata)
    about_time = recording.path in [shipped.get(name) for name in samples.ABOUT_TIME]
    for each in () if incident is None else incident.rules:
        about_time |= each.rule.lower().startswith(("itl", "ttft", "step_"))
    axis = {"axis": "time"} if about_time else None
    return judged_as(resolve(DashboardSettings, "dashboard", flags, axis), flags, recording)


def need_terminal(otherwise: str) -> None:
    """Raise WrongUsage, which says what to do `otherwise`, if there is no terminal to draw on."""
    if (stream := no_terminal()) is not None:
        raise WrongUsage(f"the dashboard needs a terminal, and {stream} is not one; {otherwise}")
    if (why_not := cannot_be_drawn_on(os.environ)) is not None:
        raise WrongUsage(f"{why_not}; {otherwise}")


def run_live(
    source: LiveSource,
    settings: DashboardSettings,
    recorder: Recorder | None = None,
    fleet: Fleet | None = None,
    keeps_levels: bool = True,
    news: Callable[[], str | None] | None = None,
    tour: Tour | None = None,
) -> None:
    """Show a live engine until its operator leaves; `keeps_levels`: save changed service levels."""
    # Textual loads slowly: imported here, so that a wrong endpoint is reported at once.
    from stepscope.tui.app.run import run_dashboard

    run_dashboard(
        source,
        source.history,
        control_endpoint=control_of(source),
        recorder=recorder,
        fleet=fleet,
        news=news,
        rules=load_alerts(),
        tour=tour,
        **dashboard_options(settings, keeps_levels),
    )


def dashboard_options(settings: DashboardSettings, keeps_levels: bool = True) -> dict[str, Any]:
    """Return the arguments of `run_dashboard` that come from the settings and the config file."""
    path, log = config_path(), None
    if settings.log is not None:
        log = Path(settings.log).expanduser()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.open("ab").close()
        except OSError as error:
            raise WrongUsage(f"--log: {log} cannot be written: {error.strerror}") from error
    is_kept = settings.keep and not settings.readonly and path != Path(os.devnull)
    kept = (*_DRAWN, *(LEVEL_NAMES if keeps_levels else ()))
    began = {name: getattr(settings, name) for name in kept}
    return {
        **{name: getattr(settings, name) for name in ("readonly", *_DRAWN)},
        "actions": load_actions(),
        "preferences": Preferences(path if is_kept else None, began),
        "log_file": log,
    }


_FILE_EVENTS_S = 5.0  # to search the file for events; of a very long file, only those found so far
# Without the screens of two runs and of several engines, which need more than one recording.
_PageName: TypeAlias = Literal["main", "step", "request", "kv", "latency", "knobs"]


@command(
    "stepscope replay session.mcap --speed 4",
    "stepscope replay chunked --at 120",
    "stepscope replay session.mcap --client result.json",
    sections=("dashboard",),
)
def replay(
    file: RecordingFile,
    speed: float = option(
        "NUMBER", "2 is twice as fast", default=1.0, min=MIN_SPEED, max=MAX_SPEED
    ),
    at: int | None = option("STEP", "open paused at this step"),
    client: str | None = option(
        "FILE", "mark where the requests of a load generator's result waited longest"
    ),
    *,
    flags: dict[str, Any],
) -> None:
    """Show a recording in the dashboard.

    Of a folder, list the incidents that are kept in it.

    The service levels in the recording apply, unless an option sets others. An incident about late
    tokens, and the samples 'freeze' and 'chunked', open on the time axis.
    """
    if (folder := Path(file)).is_dir():
        found = incidents_in(folder)
        if not found:
            how = "'stepscope record --incidents' keeps them"
            raise CommandFailed(f"{folder} holds no incident ({how})")
        for path, incident in found:
            started = time.localtime(incident.started_wall_ns / 1e9)
            say(f"{time.strftime('%Y-%m-%d %H:%M:%S', started)}  {incident.text}  {path}")
        return
    with Recording(find_recording(file)) as recording:
        note(recording.message)
        if at is not None:
            _check_step(recording, at)
        marks: list[Mark] = []
        if client is not None:
            from stepscope.recordings.importing.client_match import worst_marks
            from stepscope.tui.cli.recordings.beside import open_client  # loads more

            session, match = open_client(client, recording)
            marks = worst_marks(match, session.info.engine or "client")
        need_terminal("'stepscope explain', 'screenshot' and 'export' work without one")
        settings = recording_settings(recording, flags)
        history = new_history(settings)
        source = ReplaySource(recording, history, speed, playing=at is None, marks=marks)
        with running(source):
            if at is not None:
                source.seek(at)
            from stepscope.tui.app.run import run_dashboard

            run_dashboard(source, history, **dashboard_options(settings))


def _check_step(recording: Recording, at: int) -> None:
    first, last = recording.first_step, recording.last_step
    if first is None or last is None or not first <= at <= last:
        raise WrongUsage(f"--at: {recording.path.name} holds steps {first} to {last}, not {at}")


@command(
    "stepscope screenshot session.mcap --at 1200 -o stall.svg",
    "stepscope screenshot freeze --page latency --size 160x48 -o late.svg",
    sections=("picture",),
    defaults={"ascii": False, "axis": "as 'stepscope replay' opens"},
)
def screenshot_file(
    file: RecordingFile,
    *,
    output: str = option(
        "FILE", "the picture to write: .svg or .txt", "--output", "-o", default=...
    ),
    at: int | None = option("STEP", "the step to show  [default: the last]"),
    page: _PageName | None = option(
        "main|step|request|kv|latency|knobs", "the screen  [default: main]"
    ),
    request: str | None = option("ID", "select this request, such as r12, and show its screen"),
    size: str = option("COLUMNSxROWS", "size of the screen to draw", default="120x40"),
    zoom: int | None = option(
        "N", "steps in a column; on the time axis N x 10 ms  [default: what fits]"
    ),
    flags: dict[str, Any],
) -> None:
    """Draw the dashboard at a step of a recording.

    No terminal is needed. An existing file is replaced. Service levels come from the options, else
    from the recording, else from the config file.
    """
    path = picture_path(output, ".svg", ".txt")
    request_id = None if request is None else request_number(request)
    page = page or ("main" if request_id is None else "request")
    dimensions = picture_size(size)
    if zoom is not None and zoom not in ZOOMS:
        known = ", ".join(str(each) for each in ZOOMS)
        raise WrongUsage(f"--zoom: expected one of {known}, got {zoom}")
    with Recording(find_recording(file)) as recording:
        if recording.last_step is None:
            raise CommandFailed(f"{file} holds no step")
        step = recording.last_step if at is None else at
        _check_step(recording, step)
        settings = recording_settings(recording, flags)
        source = ReplaySource(recording, new_history(settings), playing=False)
        with running(source):
            source.seek(step)
            source.wait(60)
            source.file_index.wait(_FILE_EVENTS_S)
            from stepscope.tui.app.picture import screenshot  # loads Textual

            screenshot(
                source, source.history, path, dimensions, theme=settings.theme,
                ascii=bool(settings.ascii), page="live" if page == "main" else page,
                axis=settings.axis, zoom=zoom, request_id=request_id,
            )  # fmt: skip
        note(recording.message)
    shown = "x".join(map(str, dimensions))
    say(f"{path}: step {step:,}, {shown}, {file_size(path.stat().st_size)}")
