"""`export`: writes a recording, or a range of it, into a file of another format.

Export to CSV: a table with a header line. Unknown values are empty.

Export to JSON lines: every message as the engine sent it, its number and wall-clock time.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.engine.protocol import wire
from stepscope.recordings.check.strip import stripped
from stepscope.recordings.export.moments import Moment, Progress, moments
from stepscope.recordings.export.mooncake import MooncakeWriter, write_mooncake
from stepscope.recordings.export.output import writing
from stepscope.recordings.export.tables import COLUMNS, Table, table_rows, write_parquet
from stepscope.recordings.export.trace_events import write_perfetto
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange


def write_csv(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows."""
    text = io.TextIOWrapper(stream, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(column.name for column in COLUMNS[table])
    count = 0
    for row in table_rows(table, moments):
        writer.writerow(row)
        count += 1
    text.flush()
    text.detach()
    return count


_encode = msgspec.json.Encoder().encode


def write_jsonl(moments: Iterable[Moment], stream: IO[bytes], *, with_tokens: bool) -> int:
    """Write the messages; rows of a batch are lists. Returns the number of lines."""
    count = 0
    for moment in moments:
        message = moment.message if with_tokens else stripped(moment.message)
        time_ns = getattr(message, "tokens_ns", None) or getattr(message, "time_ns", None)
        line = {
            "sequence": moment.sequence,
            "topic": wire.TOPICS[type(message)].decode(),
            "wall_ns": None if time_ns is None else time_ns + moment.offset_ns,
            "message": message,
        }
        stream.write(_encode(line) + b"\n")
        count += 1
    return count


Format: TypeAlias = Literal["perfetto", "parquet", "csv", "jsonl", "mooncake"]
FORMATS: tuple[Format, ...] = get_args(Format)


class Exported(NamedTuple):
    """What an export has written: how many of which unit (rows, lines, ...), and notes to show."""

    num_written: int
    unit: str
    notes: tuple[str, ...] = ()


def export(
    recording: Recording,
    output: Path,
    target: Format,
    steps: StepRange,
    table: Table,
    progress: Progress,
    *,
    with_tokens: bool = False,
) -> Exported:
    """Write a recording, or a range of its steps, to `output` in another format.

    If an error occurs, no file is left.

    `with_tokens`: also write prompts and outputs, which only jsonl can contain. Then only the owner
    may read the file.

    Raises:
        RecordingError: `output` exists or cannot be written, or no step is in the range.
        MissingPackage: the format needs a package that is not installed.
    """
    with writing(output, is_private=with_tokens and recording.info.with_tokens) as stream:
        source = moments(recording, steps, progress)
        match target:
            case "perfetto":
                return Exported(write_perfetto(source, stream), "packets")
            case "parquet":
                return Exported(write_parquet(source, stream, table), table)
            case "csv":
                return Exported(write_csv(source, stream, table), table)
            case "jsonl":
                count = write_jsonl(source, stream, with_tokens=with_tokens)
                kept = "are in it" if with_tokens else "are left out (--with-tokens keeps them)"
                said = f"the prompts and outputs of the recording {kept}"
                return Exported(count, "messages", (said,) if recording.info.with_tokens else ())
            case "mooncake":
                written = write_mooncake(source, stream, recording.info.block_size)
                return Exported(written.num_lines, "requests", _mooncake_notes(written))


def _mooncake_notes(written: MooncakeWriter) -> tuple[str, ...]:
    book = written.reader.book
    notes = [
        "no tokens are looked at: hash_ids are equal where the engine's prefix cache showed "
        f"it ({book.num_hits:,} hits, {book.num_unknown:,} of unknown origin), and "
        "unique elsewhere"
    ]
    for count, what in (
        (len(written.reader.begun), "arrived before the first step of the range: left out"),
        (written.num_without_output, "got no token: left out"),
        (written.num_unfinished, "did not finish: with the tokens they had by then"),
    ):
        if count:
            notes.append(f"{count:,} requests {what}")
    return tuple(notes)
