"""`stepscope plot`: draws a plot of a recording, for a report."""

import time
from functools import partial
from typing import Any

from stepscope.recordings.export.output import writing
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.plot.axes import FigureTheme
from stepscope.recordings.plot.figure import figure, num_columns
from stepscope.recordings.plot.series import PlotSeries, read_series
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.session import model_text
from stepscope.tui.cli.shared.levels import level_of
from stepscope.tui.cli.shared.options import FirstStep, LastStep, RecordingFile, command, option
from stepscope.tui.cli.shared.output import Progress, note, say
from stepscope.tui.cli.shared.paths import find_recording, picture_path, step_range
from stepscope.tui.views.format import file_size, span

_INCHES = (9.0, 9.0)


@command(
    "stepscope plot session.mcap -o session.svg --slo-itl 50ms",
    "stepscope plot freeze --from 300 --until 400 -o f.png",
    sections=("levels",),
)
def plot_file(
    file: RecordingFile,
    *,
    output: str = option(
        "FILE", "the figure to write: .svg, .png or .pdf", "--output", "-o", default=...
    ),
    first: FirstStep = None,
    last: LastStep = None,
    theme: FigureTheme = option("light|dark", "for paper, or for slides", default="light"),
    flags: dict[str, Any],
) -> None:
    """Draw a figure of a recording for a report.

    Budget, step times, latencies, queue and KV cache over time. Each column of pixels shows the
    worst that happened in it, so no stall is averaged away; knob changes and marks are lines with
    labels. Needs 'stepscope[export]'. An existing file is replaced.
    """
    steps = step_range(first, last)
    path = picture_path(output, ".svg", ".png", ".pdf")
    with Recording(find_recording(file)) as recording:
        slo = level_of(flags, recording)
        with Progress() as progress:
            what, columns = f"reading {file}", num_columns(_INCHES[0])
            series = read_series(recording, steps, slo, columns, partial(progress, what))
        heading = recording.path.stem.encode(errors="replace").decode()
        details = _details(recording, series)
        note(recording.message)
    content = figure(series, heading, details, path.suffix[1:].lower(), _INCHES, theme)
    with writing(path, replace=True) as stream:
        stream.write(content)
    shown = f"steps {series.first_step:,} to {series.last_step:,}"
    say(f"{path}: {shown}, {file_size(len(content))}")


def _details(recording: Recording, series: PlotSeries) -> list[str]:
    info = recording.info
    wall_s = (info.wall_ns + series.start_ns - info.monotonic_ns) / 1e9
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
    # Only the knobs that differ from their defaults.
    defaults = {spec.name: spec.default for spec in info.knobs}
    set_ = {name: value for name, value in series.knobs.items() if defaults.get(name) != value}
    steps = f"steps {series.first_step:,} to {series.last_step:,}"
    about = f"{model_text(info)} on {info.name}, {steps}, {span(series.duration_ns / 1e9)} from"
    knobs = " ".join(f"{name}={typed_text(value)}" for name, value in set_.items())
    return [f"{about} {begun}", *([knobs] if knobs else [])]
