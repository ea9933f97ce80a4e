"""`stepscope export` writes a recording in the format of another program, `plot` draws a figure."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.recordings.check.strip import STRIPPED
from stepscope.recordings.export.export import FORMATS, Format, export
from stepscope.recordings.export.output import writing
from stepscope.recordings.export.tables import TABLE_FORMATS, TABLES, Table
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.plot.axes import FigureTheme
from stepscope.recordings.plot.figure import figure, num_columns
from stepscope.recordings.plot.series import PlotSeries, read_series
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.session import model_text
from stepscope.tui.cli.shared.arguments import find_recording, output_path, picture_path, step_range
from stepscope.tui.cli.shared.levels import level_of
from stepscope.tui.cli.shared.options import (
    FirstStep,
    LastStep,
    RecordingFile,
    command,
    flag,
    option,
)
from stepscope.tui.cli.shared.output import Progress, note, say
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.format import file_size, span

# A workload for Mooncake ends in .jsonl, too, but only --format asks for it.
_ENDINGS: dict[str, Format] = {
    ".pftrace": "perfetto",
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
}


@command(
    "stepscope export session.mcap -o session.pftrace",
    "stepscope export freeze -o r.csv --table requests --from 100 --until 200",
    "stepscope export session.mcap -o work.jsonl --format mooncake",
)
def export_file(
    file: RecordingFile,
    target: Format | None = option(
        "FORMAT", "perfetto, parquet, csv, jsonl or mooncake (default: by its ending)", "--format"
    ),
    *,
    output: str = option("FILE", "the file to write", "--output", "-o", default=...),
    first: FirstStep = None,
    last: LastStep = None,
    table: Table = option("TABLE", "for csv and parquet: steps, rows or requests", default="steps"),
    with_tokens: bool = flag(
        "also write prompts and outputs, if the recording has them (jsonl)", "--with-tokens"
    ),
) -> None:
    """Convert a recording to the format of another program."""
    chosen = target or _ENDINGS.get(Path(output).suffix.lower())
    if chosen is None:
        raise WrongUsage(
            f"--output: {output!r} does not tell the format: let it end in {', '.join(_ENDINGS)}, "
            f"or give --format {'|'.join(FORMATS)}"
        )
    if table != TABLES[0] and chosen not in TABLE_FORMATS:
        raise WrongUsage(f"--table: {chosen} has no tables; {' and '.join(TABLE_FORMATS)} have")
    if with_tokens and chosen != "jsonl":
        raise WrongUsage(
            f"--with-tokens: {chosen} cannot hold prompts and outputs; --format jsonl can"
        )
    steps = step_range(first, last)
    path = output_path(output, is_new=True)
    with Recording(find_recording(file)) as recording, Progress() as progress:
        if with_tokens and not recording.info.with_tokens:
            why = "its engine ran without --with-tokens"
            if STRIPPED in recording.metadata:
                why = "they were removed from it"
            raise CommandFailed(f"--with-tokens: {file} holds none, {why}")
        shown = partial(progress, f"exporting to {chosen}")
        done = export(recording, path, chosen, steps, table, shown, with_tokens=with_tokens)
        note(recording.message)
    say(f"{path}: {done.num_written:,} {done.unit}, {file_size(path.stat().st_size)}")
    say(*done.notes)


# Figures

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
    worst that happened in it, so no stall is averaged away. An existing file is replaced.
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
    wall_s = info.wall_at(series.start_ns) / 1e9
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
    steps = f"steps {series.first_step:,} to {series.last_step:,}"
    about = f"{model_text(info)} on {info.name}, {steps}, {span(series.duration_ns / 1e9)} from"
    usual = {spec.name: spec.default for spec in info.knobs}
    changed = (item for item in series.knobs.items() if usual.get(item[0]) != item[1])
    knobs = " ".join(f"{name}={typed_text(value)}" for name, value in changed)
    return list(filter(None, (f"{about} {begun}", knobs)))
