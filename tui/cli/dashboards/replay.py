"""`stepscope replay` shows a recording in the dashboard, `screenshot` draws it to a file."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings import samples
from stepscope.recordings.errors import TooLittleData
from stepscope.recordings.file.incident import incident_in, incidents_in
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.replay.replay import MAX_SPEED, MIN_SPEED, ReplaySource
from stepscope.tui.cli.dashboards.dashboard import dashboard_options, need_terminal, new_history
from stepscope.tui.cli.shared.arguments import (
    find_recording,
    picture_path,
    picture_size,
    request_number,
)  # fmt: skip
from stepscope.tui.cli.shared.levels import judged_as
from stepscope.tui.cli.shared.options import RecordingFile, command, option
from stepscope.tui.cli.shared.output import note, say
from stepscope.tui.cli.shared.process import running
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.views.format import file_size
from stepscope.tui.views.view import ZOOMS

_FILE_EVENTS_S = 5.0  # to search the file for events; of a very long file, only those found so far
# Without the screens of two runs and of several engines, which need more than one recording.
_PageName: TypeAlias = Literal["main", "step", "request", "kv", "latency", "knobs"]


def recording_settings(recording: Recording, flags: Mapping[str, Any]) -> DashboardSettings:
    """Return how to show a recording: by its service levels, and by time if it is about time."""
    shipped, incident = samples.shipped(), incident_in(recording.metadata)
    about_time = recording.path in [shipped.get(name) for name in samples.ABOUT_TIME]
    for each in () if incident is None else incident.rules:
        about_time |= each.rule.lower().startswith(("itl", "ttft", "step_"))
    axis = {"axis": "time"} if about_time else None
    return judged_as(resolve(DashboardSettings, "dashboard", flags, axis), flags, recording)


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
            from stepscope.tui.cli.recordings.other_tools import open_client  # loads more

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

            run_dashboard(source, **dashboard_options(settings))


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
            raise TooLittleData(f"{file} holds no step")
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
                source, path, dimensions, theme=settings.theme,
                ascii=bool(settings.ascii), page="live" if page == "main" else page,
                axis=settings.axis, zoom=zoom, request_id=request_id,
            )  # fmt: skip
        note(recording.message)
    shown = "x".join(map(str, dimensions))
    say(f"{path}: step {step:,}, {shown}, {file_size(path.stat().st_size)}")
