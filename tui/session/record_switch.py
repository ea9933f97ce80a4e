"""`RecordSwitch`: starts and ends recordings of one live source, one at a time.

`RecordSwitches` has those of all engines of a dashboard, also of engines whose screen was never
opened.
"""

import threading
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.file.mcap.format import PART_SUFFIX, default_name
from stepscope.recordings.history.source import NO_ENGINE, Source
from stepscope.tui.views import format as fmt

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder


class RecordSwitch:
    """Starts and ends recordings of a live source in `folder`. For the UI thread only."""

    def __init__(self, source: Source, folder: Path, recorder: "Recorder | None" = None) -> None:
        self._source = source
        self._folder = folder
        self._recorder = recorder
        self._ending: threading.Thread | None = None
        self._is_ending = False
        self._is_seen = False  # whether the operator has seen why the last recording ended

    @property
    def active(self) -> bool:
        recorder = self._recorder
        return recorder is not None and recorder.state == "recording" and not self._is_ending

    @property
    def has_engine(self) -> bool:
        return self._source.status not in NO_ENGINE

    @property
    def path(self) -> Path | None:
        """Path of the current recording, or else of the last one; None before the first."""
        return None if self._recorder is None else self._recorder.path

    @property
    def num_bytes(self) -> int:
        return 0 if self._recorder is None else self._recorder.num_bytes

    @property
    def seconds(self) -> float:
        return 0.0 if self._recorder is None else self._recorder.elapsed_s

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
        self._is_ending = self._is_seen = False
        return self._recorder.path

    def new_path(self) -> Path:
        """Return a path for a new file, named after the source and the time of day."""
        name = default_name(self._source.name)
        return untaken(self._folder, name, Path(name).suffix, PART_SUFFIX)

    def stop(self) -> None:
        """End the recording; a thread of its own finishes the file."""
        if self._recorder is not None and self.active:
            self._is_ending = True
            # Not a daemon thread: the process waits on exit until the file is complete.
            self._ending = threading.Thread(target=self._recorder.stop, name="end of the recording")
            self._ending.start()

    def last(self) -> str | None:
        """Return a summary of the last recording, once its file is complete; None without one."""
        recorder = self._recorder
        if recorder is None:
            return None
        if self._ending is not None:
            self._ending.join()
        steps = fmt.plural(recorder.num_steps, "step")
        extent = f"{steps}, {fmt.duration(recorder.elapsed_s)}, {fmt.size(recorder.num_bytes)}"
        why = "" if recorder.error is None else f": {recorder.error}"
        return f"recording  {recorder.path} ({extent}){why}"


def untaken(folder: Path, name: str, suffix: str, unfinished: str) -> Path:
    """Return a path in a folder, numbered if need be, that no file and no unfinished one has."""
    for number in count(1):
        tail = suffix if number == 1 else f"-{number}{suffix}"
        path = folder / (name.removesuffix(suffix) + tail)
        # In this order: a file that another thread completes meanwhile is seen by its new name.
        if not path.with_name(path.name + unfinished).exists() and not path.exists():
            return path
    raise AssertionError("numbers end")


class RecordSwitches:
    """One `RecordSwitch` for each live source, made on first use. For the UI thread."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.cwd()
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
        found = {source: switch.error for source, switch in self._switches.items()}
        return {source: error for source, error in found.items() if error is not None}

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
