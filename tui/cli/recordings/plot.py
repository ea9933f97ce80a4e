"""`stepscope plot`: draws a plot of a recording, for a report."""

import re
import time

from stepscope.recordings.export.output import MissingPackage, writing
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.plot.figure import figure, num_columns
from stepscope.recordings.plot.series import PlotSeries, read_series
from stepscope.recordings.plot.style import COLOURS
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.origin import model_text
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.levels import level_flags, level_of
from stepscope.tui.cli.shared.picture_path import picture_path
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.cli.shared.steps import step_range
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.format import file_size

_MIN_INCHES, _MAX_INCHES = 7.0, 60.0


def plot_file(
    file: str,
    output: str,
    first: int | None,
    last: int | None,
    slo_itl: str | None,
    slo_ttft: str | None,
    dimensions: str,
    theme: str,
    title: str | None,
) -> None:
    """Draw the plot into a file, and print what it shows.

    Raises:
        WrongUsage: an option is not valid, or the range is empty.
        CommandFailed, RecordingError: the recording cannot be read, or the plot not written.
    """
    chosen = next((each for each in COLOURS if each == theme), None)
    if chosen is None:
        raise WrongUsage(f"--theme: expected {' or '.join(COLOURS)}, got {theme!r}")
    steps = step_range(first, last)
    path = picture_path(output, (".svg", ".png", ".pdf"))
    inches = _inches(dimensions)
    flags = level_flags(slo_itl, slo_ttft)
    with Recording(find_recording(file)) as recording:
        slo = level_of(flags, recording)
        with Progress() as progress:
            series = read_series(
                recording,
                steps,
                slo,
                num_columns(inches[0]),
                lambda share: progress("reading the recording", share),
            )
        heading = title or recording.path.stem.encode(errors="replace").decode()
        details = _details(recording, series)
        message = recording.message
    try:
        content = figure(series, heading, details, path.suffix[1:].lower(), inches, chosen)
    except MissingPackage as error:
        raise CommandFailed(str(error)) from error
    with writing(path, replace=True) as stream:
        stream.write(content)
    shown = f"steps {series.first_step:,} to {series.last_step:,}"
    say(f"{path}: {shown}, {inches[0]:g}x{inches[1]:g} inches, {file_size(len(content))}")
    if message is not None:
        say(message)


def _details(recording: Recording, series: PlotSeries) -> list[str]:
    info = recording.info
    wall_s = (info.wall_ns + series.start_ns - info.monotonic_ns) / 1e9
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
    # Only the knobs that differ from their defaults.
    defaults = {spec.name: spec.default for spec in info.knobs}
    knobs = [
        f"{name}={typed_text(value)}"
        for name, value in series.knobs.items()
        if defaults.get(name) != value
    ]
    about = (
        f"{model_text(info)} on {info.name}, steps {series.first_step:,} to {series.last_step:,}, "
        f"{_duration(series.duration_ns / 1e9)} from {begun}"
    )
    return [about, " ".join(knobs)] if knobs else [about]


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _inches(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[xX×]\s*(\d+(?:\.\d+)?)", text.strip())
    if match is None:
        raise WrongUsage(f"--size: expected inches such as 10x9, got {text!r}")
    width, height = float(match[1]), float(match[2])
    if not all(_MIN_INCHES <= side <= _MAX_INCHES for side in (width, height)):
        raise WrongUsage(
            f"--size: expected {_MIN_INCHES:g} to {_MAX_INCHES:g} inches, got {text!r}"
        )
    return width, height
