"""What a dashboard writes to files. `RecordSwitch`: recordings of one live source, one at a time.

`RecordSwitches` has those of all engines of a dashboard, also of engines whose screen was never
opened. `FileJobs` writes recordings of the steps in memory, one at a time, on a thread of its own.
"""

import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import PART_SUFFIX, default_name
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Tone

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder

log = logging.getLogger("stepscope.tui")

_CLOSE_S = 5.0  # wait until a cancelled file is removed


class RecordSwitch:
    """Starts and ends recordings of a live source in `folder`. For the UI thread only."""

    def __init__(self, source: Source, folder: Path, recorder: "Recorder | None" = None) -> None:
        self._source = source
        self._folder = folder
        self._recorder = recorder
        self._ending: threading.Thread | None = None
        self._is_seen = False  # whether the operator has seen why the last recording ended

    @property
    def active(self) -> "Recorder | None":
        """The recording that runs, if there is one."""
        recorder = self._recorder
        is_running = recorder is not None and recorder.state == "recording"
        return recorder if is_running and self._ending is None else None

    @property
    def error(self) -> str | None:
        """Why a recording has ended by itself, in one line; None once the operator has seen it."""
        return None if self._recorder is None or self._is_seen else self._recorder.error

    def seen(self) -> None:
        """Note that the operator has pressed a key: an error on the screen counts as seen."""
        self._is_seen = self._recorder is not None and self._recorder.error is not None

    def start(self) -> Path:
        """Record to a new file; return its path, or raise RecordingError."""
        from stepscope.recordings.live.recorder import Recorder  # loads mcap and zstd

        chosen = dict(self._source.history.chosen)  # the file holds those of the engine
        self._recorder = Recorder(self._source, self.new_path(), chosen)
        self._ending, self._is_seen = None, False
        return self._recorder.path

    def new_path(self) -> Path:
        """Return a path for a new file, named after the source and the time of day."""
        path = first = self._folder / default_name(self._source.name)
        number = 1
        # In this order: a file that another thread completes meanwhile is seen by its new name.
        while path.with_name(path.name + PART_SUFFIX).exists() or path.exists():
            number += 1
            path = first.with_stem(f"{first.stem}-{number}")
        return path

    def stop(self) -> None:
        """End the recording; a thread of its own finishes the file."""
        if (recorder := self.active) is not None:
            # Not a daemon thread: the process waits on exit until the file is complete.
            self._ending = threading.Thread(target=recorder.stop, name="end of the recording")
            self._ending.start()

    def last(self) -> str | None:
        """Return a summary of the last recording, once its file is complete; None without one."""
        recorder = self._recorder
        if recorder is None:
            return None
        if self._ending is not None:
            self._ending.join()
        steps = fmt.plural(recorder.num_steps, "step")
        extent = f"{steps}, {fmt.span(recorder.elapsed_s)}, {fmt.size(recorder.num_bytes)}"
        why = "" if recorder.error is None else f": {recorder.error}"
        return f"recording  {recorder.path} ({extent}){why}"


class RecordSwitches:
    """One `RecordSwitch` for each live source, made on first use. For the UI thread."""

    def __init__(self) -> None:
        self._folder = Path.cwd()
        self._switches: dict[Source, RecordSwitch] = {}

    def of(self, source: Source, recorder: "Recorder | None" = None) -> RecordSwitch | None:
        """Return the switch of a live source, with a `recorder` that runs, else None."""
        if not source.is_live:
            return None
        if source not in self._switches:
            self._switches[source] = RecordSwitch(source, self._folder, recorder)
        return self._switches[source]

    @property
    def active(self) -> Collection[Source]:
        return [source for source, switch in self._switches.items() if switch.active]

    @property
    def errors(self) -> dict[Source, str]:
        """Source -> why its recording has ended by itself, for errors that were not seen yet."""
        switches = self._switches.items()
        return {source: each.error for source, each in switches if each.error is not None}

    def seen(self, source: Source | None) -> None:
        """Count errors as seen, after a key: those of the `source` on the screen; None: of all."""
        for each, switch in self._switches.items():
            if source is None or each is source:
                switch.seen()

    def stop(self) -> None:
        """End all recordings; for each, a thread of its own finishes the file."""
        for switch in self._switches.values():
            switch.stop()

    def last(self) -> list[str]:
        """Return a summary of the last recording of each source. Call it after `stop`."""
        summaries = [switch.last() for switch in self._switches.values()]
        return [line for line in summaries if line is not None]


class _Cancelled(Exception):  # noqa: N818 - not an error
    """Raised in the writing thread when the operator has cancelled the file."""


class FileJobs:
    """Writes recordings of the steps in memory, for all screens. Only for the UI thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # until its outcome was told
        self._is_cancelled = threading.Event()
        self._file = ""
        self._share = 0.0  # of the work, done
        self._outcome: tuple[str, Tone] | None = None

    def write_memory(self, history: History, path: Path) -> None:
        """Start to write the steps in `history`, completely or not at all; one file at a time."""
        if self._thread is None:
            self._file, self._share = path.name, 0.0
            self._is_cancelled.clear()
            self._thread = threading.Thread(
                target=self._run, args=(history, path), name="keep steps", daemon=True
            )
            self._thread.start()

    @property
    def active(self) -> str | None:
        """The file that is being written, with its progress, as text; None if there is none."""
        return f"writing {self._file} {fmt.percent(self._share)}" if self._thread else None

    def cancel(self) -> bool:
        """Cancel the file that is being written; return False if there is none."""
        self._is_cancelled.set()
        return self._thread is not None

    def news(self) -> tuple[str, Tone] | None:
        """Return one line on how the last file ended, with its tone; each is reported once."""
        if (outcome := self._outcome) is not None:  # the thread sets it once, as its last act
            self._outcome = self._thread = None
        return outcome

    def close(self) -> None:
        """Cancel the file that is being written, and wait a moment until it is removed."""
        self.cancel()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self, history: History, path: Path) -> None:
        from stepscope.recordings.history.memory_file import write_memory  # loads mcap

        try:
            steps = fmt.plural(write_memory(history, path, self._progress), "step")
            size = fmt.size(path.stat().st_size)
            self._outcome = f"wrote {path.name}, {size}, {steps}, in {path.parent}", "good"
        except _Cancelled:
            self._outcome = f"{path.name} cancelled; no file was written", "text"
        except (RecordingError, OSError) as error:
            self._outcome = f"no recording: {error}", "caution"
        except Exception as error:
            log.exception("writing %s failed", path)
            self._outcome = f"recording failed, {see_log(error)}", "caution"

    def _progress(self, share: float) -> None:
        self._share = share
        if self._is_cancelled.is_set():
            raise _Cancelled
