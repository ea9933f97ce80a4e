"""`FileJobs`: writes files (exports, recordings), one at a time, on a thread of its own."""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.tui.session.record_switch import untaken
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Tone

if TYPE_CHECKING:
    from stepscope.recordings.export.export import Format
    from stepscope.recordings.export.tables import Table

log = logging.getLogger("stepscope.tui")

_CLOSE_S = 5.0
_ENDINGS = (".mcap.part", ".mcap", ".part")
SUFFIXES: "Mapping[Format, str]" = {
    "perfetto": ".pftrace",
    "parquet": ".parquet",
    "csv": ".csv",
    "jsonl": ".jsonl",
    "mooncake": ".mooncake.jsonl",
}


class ExportOrder(NamedTuple):
    """What to export, and in which format; `file_name` says to which file of the folder."""

    path: Path  # the recording
    folder: Path
    target: "Format"
    table: "Table" = "steps"
    steps: StepRange = StepRange()
    engine_id: str | None = None  # of the run that numbered the steps; None: any


def typed_order(text: str, of: ExportOrder, shown: StepRange) -> ExportOrder:
    """Return `of` with what was typed, such as `csv requests 100-200`.

    `shown`: the steps that the word `screen` stands for.

    Raises ValueError: a word means nothing; the message says what could stand there.
    """
    from stepscope.recordings.export.tables import TABLE_FORMATS, TABLES

    targets = [each for word in text.split() for each in SUFFIXES if each == word]
    if len(targets) != 1:
        raise ValueError(f"name one of {', '.join(SUFFIXES)}")
    order = of._replace(target=targets[0])
    for word in text.split():
        tables = [each for each in TABLES if each == word]
        steps = re.fullmatch(r"(\d+)-(\d+)", word)
        if tables and order.target in TABLE_FORMATS:
            order = order._replace(table=tables[0])
        elif steps is not None:
            order = order._replace(steps=StepRange(int(steps[1]), int(steps[2])))
        elif word == "screen":
            order = order._replace(steps=shown)
        elif word != order.target:
            wanted = f"{', '.join(TABLES)}, " if order.target in TABLE_FORMATS else ""
            raise ValueError(f"{word!r}: after {order.target} may stand {wanted}100-200 or screen")
    return order


def file_name(order: ExportOrder) -> str:
    from stepscope.recordings.export.tables import TABLE_FORMATS

    name = order.path.name
    stem = next((name.removesuffix(end) for end in _ENDINGS if name.endswith(end)), name)
    if order.steps != StepRange():
        stem += f"-{order.steps.first}-{order.steps.last}"
    if order.target in TABLE_FORMATS:
        stem += f"-{order.table}"
    return stem + SUFFIXES[order.target]


class _Cancelled(Exception):  # noqa: N818 - not an error
    """Raised in the writing thread when the operator has cancelled the file."""


class FileJob:
    """A job that writes one file, completely or not at all.

    `write`: writes the file and returns one line about it; calls its argument with the share of the
    work that is done.
    """

    def __init__(self, what: str, name: str, write: Callable[[Callable[[float], None]], str]):
        self.what = what
        self.name = name
        self.share = 0.0  # of the work, done
        self.outcome: tuple[str, Tone] | None = None  # a line once the job has ended
        self._write = write
        self._is_cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ask the job to end soon and leave no file behind. Does not wait."""
        self._is_cancelled.set()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        from stepscope.recordings.export.output import MissingPackage

        try:
            self.outcome = self._write(self._progress), "good"
        except _Cancelled:
            self.outcome = f"{self.what} to {self.name} cancelled; no file was written", "text"
        except (RecordingError, MissingPackage, OSError) as error:
            self.outcome = f"no {self.what}: {error}", "caution"
        except Exception as error:
            log.exception("%s to %s failed", self.what, self.name)
            self.outcome = f"{self.what} failed, {see_log(error)}", "caution"

    def _progress(self, share: float) -> None:
        self.share = share
        if self._is_cancelled.is_set():
            raise _Cancelled


def _exported(order: ExportOrder, progress: Callable[[float], None]) -> str:
    from stepscope.recordings.export.export import export  # with mcap, only when needed
    from stepscope.recordings.export.output import UNFINISHED_SUFFIX
    from stepscope.recordings.file.reader import Recording

    with Recording(order.path) as recording:
        known = (None, recording.info.engine_id)
        if order.steps != StepRange() and order.engine_id not in known:
            raise RecordingError(
                f"{recording.path.name} was recorded before the engine restarted: export all of "
                f"it, or record again"
            )
        suffix = SUFFIXES[order.target]
        path = untaken(order.folder, file_name(order), suffix, UNFINISHED_SUFFIX)
        done = export(recording, path, order.target, order.steps, order.table, progress)
    size = fmt.size(path.stat().st_size)
    said = f"exported {path.name}, {size}, {done.num_written:,} {done.unit}, in {path.parent}"
    return "; ".join((said, *done.notes))


def _remembered(history: History, path: Path, progress: Callable[[float], None]) -> str:
    from stepscope.recordings.history.memory_file import write_memory

    steps = fmt.plural(write_memory(history, path, progress), "step")
    return f"wrote {path.name}, {fmt.size(path.stat().st_size)}, {steps}, in {path.parent}"


@dataclass(slots=True)
class FileJobs:
    """Starts and cancels the jobs that write files, for all screens; only for the UI thread."""

    last: str = "perfetto"  # the order that was typed last
    _job: FileJob | None = None

    def begin(self, order: ExportOrder) -> None:
        """Start an export; do nothing if a file is already being written."""
        if self._job is None:
            name = file_name(order)
            self._job = FileJob("export", name, lambda progress: _exported(order, progress))

    def write_memory(self, history: History, path: Path) -> None:
        """Start to write the steps in `history` to a recording, unless a file is being written."""
        if self._job is None:
            self._job = FileJob(
                "recording", path.name, lambda progress: _remembered(history, path, progress)
            )

    @property
    def active(self) -> str | None:
        """The file that is being written, with its progress, as text; None if there is none."""
        job = self._job
        return None if job is None else f"writing {job.name} {fmt.percent(job.share)}"

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
