"""`stepscope export`: writes a recording in the format of another program."""

from functools import partial
from pathlib import Path

from stepscope.recordings.check.strip import was_stripped
from stepscope.recordings.export.export import FORMATS, Format, export
from stepscope.recordings.export.tables import TABLE_FORMATS, TABLES, Table
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.shared import options
from stepscope.tui.cli.shared.output import Progress, note, say
from stepscope.tui.cli.shared.paths import find_recording, output_path, step_range
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.format import file_size

# A workload for Mooncake ends in .jsonl, too, but only --format asks for it.
_ENDINGS: dict[str, Format] = {
    ".pftrace": "perfetto",
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
}


@options.command(
    "stepscope export session.mcap -o session.pftrace",
    "stepscope export freeze -o r.csv --table requests --from 100 --until 200",
    "stepscope export session.mcap -o work.jsonl --format mooncake",
)
def export_file(
    file: options.RecordingFile,
    target: Format | None = options.option(
        "FORMAT",
        "perfetto, parquet, csv, jsonl or mooncake (default: by the file's ending: "
        ".pftrace, .parquet, .csv or .jsonl)",
        "--format",
    ),
    *,
    output: str = options.option("FILE", "the file to write", "--output", "-o", default=...),
    first: options.FirstStep = None,
    last: options.LastStep = None,
    table: Table = options.option(
        "TABLE", "for csv and parquet: steps, rows or requests", default="steps"
    ),
    with_tokens: bool = options.flag(
        "also write prompts and outputs, if the recording has them (jsonl)", "--with-tokens"
    ),
) -> None:
    """Convert a recording to the format of another program."""
    chosen = target or _format_by_ending(output)
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
            if was_stripped(recording.metadata):
                why = "they were removed from it"
            raise CommandFailed(f"--with-tokens: {file} holds none, {why}")
        shown = partial(progress, f"exporting to {chosen}")
        done = export(recording, path, chosen, steps, table, shown, with_tokens=with_tokens)
        note(recording.message)
    say(f"{path}: {done.num_written:,} {done.unit}, {file_size(path.stat().st_size)}")
    say(*done.notes)


def _format_by_ending(output: str) -> Format:
    ending = Path(output).suffix.lower()
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    raise WrongUsage(
        f"--output: {output!r} does not tell the format: let it end in {', '.join(_ENDINGS)}, or "
        f"give --format {'|'.join(FORMATS)}"
    )
