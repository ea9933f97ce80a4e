"""`FileJobs`: writes files (exports, recordings), one at a time, on a thread of its own."""

import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.history import History
from stepscope.tui.session.record_switch import untaken
from stepscope.tui.settings.log_file import see_log
from stepscope.tui.settings.recent import remember
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Tone

if TYPE_CHECKING:
    from stepscope.recordings.export.export import Format
    from stepscope.recordings.export.tables import Table
    from stepscope.recordings.file.reader import Recording

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
    return untaken(order.folder, file_name(order), order.choice.suffix, unfinished_suffix)


log = logging.getLogger("stepscope.tui")

_CLOSE_S = 5.0


class _Cancelled(Exception):  # noqa: N818 - not an error
    """Raised in the writing thread when the operator has cancelled the file."""


class FileJob(ABC):
    """Base class of jobs that write one file, completely or not at all."""

    doing, noun = "writing", "recording"

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = 0.0  # of the work, done
        self.outcome: tuple[str, Tone] | None = None  # a line once the job has ended
        self._is_cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Ask the job to end soon and leave no file behind. Does not wait."""
        self._is_cancelled.set()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        from stepscope.recordings.export.output import MissingPackage

        try:
            self.outcome = self._write(), "good"
        except _Cancelled:
            self.outcome = f"{self.noun} to {self.name} cancelled; no file was written", "text"
        except (RecordingError, MissingPackage, OSError) as error:
            self.outcome = f"no {self.noun}: {error}", "caution"
        except Exception as error:
            log.exception("%s to %s failed", self.noun, self.name)
            self.outcome = f"{self.noun} failed, {see_log(error)}", "caution"

    @abstractmethod
    def _write(self) -> str:
        """Write the file, and return one line about what was written."""

    def _progress(self, share: float) -> None:
        self.share = share
        if self._is_cancelled.is_set():
            raise _Cancelled


class ExportJob(FileJob):
    """Writes a recording or a part of it in another format."""

    doing, noun = "exporting", "export"

    def __init__(self, order: ExportOrder) -> None:
        super().__init__(file_name(order))
        self.order = order

    def _write(self) -> str:
        from stepscope.recordings.export.export import export  # with mcap, only when needed
        from stepscope.recordings.export.output import UNFINISHED_SUFFIX
        from stepscope.recordings.file.reader import Recording
        from stepscope.recordings.file.step_range import StepRange

        order = self.order
        with Recording(order.path) as recording:
            self.order = order = order._replace(steps=_within(order, recording))
            path = new_path(order, UNFINISHED_SUFFIX)
            self.name = path.name
            steps = StepRange(order.steps.first, order.steps.last)
            done = export(recording, path, order.choice.name, steps, order.table, self._progress)
        size = fmt.size(path.stat().st_size)
        said = f"exported {path.name}, {size}, {done.num_written:,} {done.unit}, in {path.parent}"
        return "; ".join((said, *done.notes))


class MemoryJob(FileJob):
    """Writes the steps in memory to a recording."""

    def __init__(self, history: History, path: Path) -> None:
        super().__init__(path.name)
        self._history = history
        self._path = path

    def _write(self) -> str:
        from stepscope.recordings.history.memory_file import write_memory

        path = self._path
        steps = fmt.plural(write_memory(self._history, path, self._progress), "step")
        remember(path)
        return f"wrote {path.name}, {fmt.size(path.stat().st_size)}, {steps}, in {path.parent}"


def _within(order: ExportOrder, recording: "Recording") -> RangeChoice:
    """Return the ordered range as far as recorded; RecordingError: of another engine run."""
    steps = order.steps
    if steps.first is None and steps.last is None:
        return steps
    if order.engine_id not in (None, recording.info.engine_id):
        raise RecordingError(
            f"{recording.path.name} was recorded before the engine restarted: export all of it, "
            f"or record again"
        )
    first, last = steps.first, steps.last
    if first is not None and recording.first_step is not None:
        first = max(first, recording.first_step)
    if last is not None and recording.last_step is not None:
        last = min(last, recording.last_step)
    if first is not None and last is not None and first > last:
        return steps  # nothing in common: the exporter's error says what the recording holds
    return steps._replace(first=first, last=last)


@dataclass(slots=True)
class FileJobs:
    """Starts and cancels the jobs that write files, for all screens; only for the UI thread."""

    last: ExportOrder | None = None
    _job: FileJob | None = None

    def begin(self, order: ExportOrder) -> None:
        """Start an export; do nothing if a file is already being written."""
        if self._job is None:
            self.last = order
            self._start(ExportJob(order))

    def write_memory(self, history: History, path: Path) -> None:
        """Start to write the steps in `history` to a recording, unless a file is being written."""
        if self._job is None:
            self._start(MemoryJob(history, path))

    def _start(self, job: FileJob) -> None:
        self._job = job
        job.start()

    @property
    def active(self) -> str | None:
        """The file that is being written, with its progress, as text; None if there is none."""
        job = self._job
        return None if job is None else f"{job.doing} {job.name} {fmt.percent(job.share)}"

    def cancel(self) -> bool:
        """Cancel the file that is being written; return False if there is none."""
        if self._job is None:
            return False
        self._job.cancel()
        return True

    def news(self) -> tuple[str, Tone] | None:
        """Return one line on how the last job ended, with its tone; each job is reported once."""
        job = self._job
        if job is None or job.outcome is None:
            return None
        self._job = None
        return job.outcome

    def close(self) -> None:
        """Cancel the file that is being written, and wait a moment until it is removed."""
        if self._job is not None:
            self._job.cancel()
            self._job.wait(_CLOSE_S)
