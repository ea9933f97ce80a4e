"""`ExportOrder`: which part of a recording to export, in which format, to which file."""

from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.recordings.export.export import Format
    from stepscope.recordings.export.tables import Table

_ENDINGS = (".mcap.part", ".mcap", ".part")


class FormatChoice(NamedTuple):
    """A file format as the export dialog offers it."""

    name: "Format"
    suffix: str
    opens: str  # what is in such a file, and which programs open it
    package: str | None = None  # that writing it needs
    is_table: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the package that this format needs is installed."""
        return self.package is None or find_spec(self.package) is not None

    @property
    def wanted(self) -> str:
        """What to install if the package is missing."""
        return f"pip install 'stepscope[export]' (or {self.package})"


FORMAT_CHOICES: tuple[FormatChoice, ...] = (
    FormatChoice(
        "perfetto", ".pftrace", "steps, requests, counters: ui.perfetto.dev", package="perfetto"
    ),
    FormatChoice(
        "parquet", ".parquet", "a table: DuckDB, Polars, pandas", package="pyarrow", is_table=True
    ),
    FormatChoice("csv", ".csv", "a table: spreadsheets, and everything else", is_table=True),
    FormatChoice("jsonl", ".jsonl", "every message, one a line: jq, scripts"),
    FormatChoice("mooncake", ".mooncake.jsonl", "its workload: stepscope load --trace"),
)


class RangeChoice(NamedTuple):
    """The steps from `first` to `last`, both included; None: from or to the end."""

    text: str
    first: int | None = None
    last: int | None = None


class ExportOrder(NamedTuple):
    """What to export, in which format and to which file."""

    path: Path  # the recording
    choice: FormatChoice
    table: "Table"
    steps: RangeChoice
    folder: Path
    engine_id: str | None  # of the run that numbered the steps; None: any


def file_name(order: ExportOrder) -> str:
    """Return a name for the exported file: the recording's name, the range and the table."""
    name = order.path.name
    stem = next((name.removesuffix(end) for end in _ENDINGS if name.endswith(end)), name)
    if order.steps.first is not None or order.steps.last is not None:
        ends = ("" if end is None else str(end) for end in order.steps[1:])
        stem += f"-{'-'.join(ends)}"
    if order.choice.is_table:
        stem += f"-{order.table}"
    return stem + order.choice.suffix


def new_path(order: ExportOrder, unfinished_suffix: str) -> Path:
    """Return a path that is taken neither by a file nor by an unfinished export."""
    name, suffix = file_name(order), order.choice.suffix
    for number in count(1):
        tail = suffix if number == 1 else f"-{number}{suffix}"
        path = order.folder / (name.removesuffix(suffix) + tail)
        if not path.exists() and not path.with_name(path.name + unfinished_suffix).exists():
            return path
    raise AssertionError("numbers end")
