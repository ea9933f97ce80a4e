"""`stepscope screenshot`: draws the dashboard at one step of a recording."""

from typing import Any, Literal, TypeAlias

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.tui.cli.dashboards.dashboard import new_history, recording_settings
from stepscope.tui.cli.shared.options import RecordingFile, command, option
from stepscope.tui.cli.shared.output import note, say
from stepscope.tui.cli.shared.paths import (
    find_recording,
    picture_path,
    picture_size,
    request_number,
)
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.format import file_size
from stepscope.tui.views.view import ZOOMS

_FILE_EVENTS_S = 5.0  # to search the file for events; of a very long file, only those found so far
# Without the screens of two runs and of several engines, which need more than one recording.
_PageName: TypeAlias = Literal["main", "step", "request", "kv", "latency", "knobs"]


@command(
    "stepscope screenshot session.mcap --at 1200 -o stall.svg",
    "stepscope screenshot freeze --page latency --size 160x48 -o late.svg",
    "stepscope screenshot freeze --axis step -o steps.svg",
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

    No terminal is needed. SVG keeps its text selectable. An existing file is replaced. Options
    override [dashboard] in the config file. Service levels come from the options, else from the
    recording, else from the config file.
    """
    path = picture_path(output)
    request_id = None if request is None else request_number(request)
    page = page or ("main" if request_id is None else "request")
    num_columns, num_rows = picture_size(size)
    if zoom is not None and zoom not in ZOOMS:
        known = ", ".join(str(each) for each in ZOOMS)
        raise WrongUsage(f"--zoom: expected one of {known}, got {zoom}")
    with Recording(find_recording(file)) as recording:
        first, last = recording.first_step, recording.last_step
        if first is None or last is None:
            raise CommandFailed(f"{file} holds no step")
        step = last if at is None else at
        if not first <= step <= last:
            raise WrongUsage(f"--at: {recording.path.name} holds steps {first} to {last}, not {at}")
        settings = recording_settings(recording, flags)
        source = ReplaySource(recording, new_history(settings), playing=False)
        source.start()
        try:
            source.seek(step)
            source.wait(60)
            source.file_index.wait(_FILE_EVENTS_S)
            from stepscope.tui.app.picture import screenshot  # loads Textual

            screenshot(
                source,
                source.history,
                path,
                (num_columns, num_rows),
                theme=settings.theme,
                ascii=bool(settings.ascii),
                page="live" if page == "main" else page,
                axis=settings.axis,
                zoom=zoom,
                request_id=request_id,
            )
        finally:
            source.stop()
        note(recording.message)
    say(f"{path}: step {step:,}, {num_columns}x{num_rows}, {file_size(path.stat().st_size)}")
