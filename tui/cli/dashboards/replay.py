"""`stepscope replay`: shows a recording in the dashboard."""

import time
from pathlib import Path
from typing import Any

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings import samples
from stepscope.recordings.file.incident import incidents_in
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.replay.playhead import MAX_SPEED, MIN_SPEED
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.tui.cli.dashboards.dashboard import (
    dashboard_options,
    need_terminal,
    new_history,
    recording_settings,
)
from stepscope.tui.cli.shared.options import RecordingFile, command, option
from stepscope.tui.cli.shared.output import note, say
from stepscope.tui.cli.shared.paths import find_recording
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.preferences import remember


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
    if Path(file).is_dir():
        list_incidents(Path(file))
        return
    with Recording(find_recording(file)) as recording:
        note(recording.message)
        first, last = recording.first_step, recording.last_step
        if at is not None and (first is None or last is None or not first <= at <= last):
            raise WrongUsage(f"--at: {recording.path.name} holds steps {first} to {last}, not {at}")
        marks: list[Mark] = []
        if client is not None:
            from stepscope.recordings.importing.client_match import worst_marks
            from stepscope.tui.cli.dashboards.client_report import open_client  # loads more

            session, match = open_client(client, recording)
            marks = worst_marks(match, session.info.engine or "client")
        need_terminal("'stepscope explain', 'screenshot' and 'export' work without one")
        settings = recording_settings(recording, flags)
        source = ReplaySource(
            recording, new_history(settings), speed, playing=at is None, marks=marks
        )
        source.start()
        if recording.path not in samples.shipped().values():
            remember(recording.path)
        try:
            if at is not None:
                source.seek(at)
            from stepscope.tui.app.run import run_dashboard

            run_dashboard(source, source.history, **dashboard_options(settings))
        finally:
            source.stop()


def list_incidents(folder: Path) -> None:
    """Print the incidents kept in a folder, one a line, the newest first."""
    found = incidents_in(folder)
    if not found:
        raise CommandFailed(
            f"{folder} holds no incident ('stepscope record --incidents' keeps them)"
        )
    for path, incident in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.started_wall_ns / 1e9))
        say(f"{when}  {incident.text}  {path}")
