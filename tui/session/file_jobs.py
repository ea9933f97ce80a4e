"""`FileJobs`: writes recordings of the steps in memory, one at a time, on a thread of its own."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.history import History
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Tone

log = logging.getLogger("stepscope.tui")

_CLOSE_S = 5.0


class _Cancelled(Exception):  # noqa: N818 - not an error
    """Raised in the writing thread when the operator has cancelled the file."""


class FileJob(threading.Thread):
    """Writes the steps in `history` to one file, completely or not at all."""

    def __init__(self, history: History, path: Path) -> None:
        super().__init__(name="keep steps", daemon=True)
        self.path = path
        self.share = 0.0  # of the work, done
        self.outcome: tuple[str, Tone] | None = None  # a line once the job has ended
        self._history = history
        self._is_cancelled = threading.Event()
        self.start()

    def cancel(self) -> None:
        """Ask the job to end soon and leave no file behind. Does not wait."""
        self._is_cancelled.set()

    def run(self) -> None:
        from stepscope.recordings.history.memory_file import write_memory  # loads mcap

        path = self.path
        try:
            steps = fmt.plural(write_memory(self._history, path, self._progress), "step")
            size = fmt.size(path.stat().st_size)
            self.outcome = f"wrote {path.name}, {size}, {steps}, in {path.parent}", "good"
        except _Cancelled:
            self.outcome = f"{path.name} cancelled; no file was written", "text"
        except (RecordingError, OSError) as error:
            self.outcome = f"no recording: {error}", "caution"
        except Exception as error:
            log.exception("writing %s failed", path)
            self.outcome = f"recording failed, {see_log(error)}", "caution"

    def _progress(self, share: float) -> None:
        self.share = share
        if self._is_cancelled.is_set():
            raise _Cancelled


@dataclass(slots=True)
class FileJobs:
    """Starts and cancels the jobs that write files, for all screens; only for the UI thread."""

    _job: FileJob | None = None

    def write_memory(self, history: History, path: Path) -> None:
        """Start to write the steps in `history` to a recording, unless a file is being written."""
        if self._job is None:
            self._job = FileJob(history, path)

    @property
    def active(self) -> str | None:
        """The file that is being written, with its progress, as text; None if there is none."""
        job = self._job
        return None if job is None else f"writing {job.path.name} {fmt.percent(job.share)}"

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
            self._job.join(_CLOSE_S)
