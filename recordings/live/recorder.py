"""`Recorder`: records what a live source receives, from now until it is stopped."""

import time
from pathlib import Path
from types import MappingProxyType

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.rotation import FileSeries
from stepscope.recordings.file.writing.writer import RecordingState, RecordingWriter
from stepscope.recordings.history.source import Source


class Recorder:
    """Connects a `RecordingWriter` to a live source, and starts recording at once.

    Args:
        source: a live source, which need not have joined an engine yet.
        levels: service levels to store in the file.

    Raises RecordingError: the source is itself a recording, or `target` cannot be written.
    """

    def __init__(
        self,
        source: Source,
        target: Path | str | FileSeries,
        levels: Levels = MappingProxyType({}),
    ) -> None:
        if not source.is_live:
            raise RecordingError(f"{source.name} is a recording already")
        self._source = source
        self._writer = RecordingWriter(target, levels)
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        # Subscribe before the snapshot: the writer drops messages that are in both.
        source.tap.attach(self._hand_over)
        self._writer.start(source.history.snapshot())

    @property
    def path(self) -> Path:
        """The file being written, or the last one written."""
        return self._writer.path

    @property
    def num_files(self) -> int:
        return self._writer.num_files

    @property
    def state(self) -> RecordingState:
        return self._writer.state

    @property
    def error(self) -> str | None:
        """Why the recording failed or ended early, in one line; None if it did not."""
        return self._writer.error

    @property
    def elapsed_s(self) -> float:
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        return end_s - self._started_s

    @property
    def num_bytes(self) -> int:
        """Bytes written to all files. Updated once a second."""
        return self._writer.num_bytes

    @property
    def num_steps(self) -> int:
        return self._writer.num_steps

    def stop(self) -> None:
        """Finish the file. May be called twice."""
        self._let_go()
        self._writer.close()

    def _hand_over(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if self._writer.state == "recording":
            self._writer.on_frame(topic, sequence, payload)
        else:  # it ended early: a full disk, or the engine restarted
            self._let_go()

    def _let_go(self) -> None:
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self._source.tap.detach(self._hand_over)
