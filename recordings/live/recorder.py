"""`Recorder`: records what a live source receives, from now until it is stopped."""

import time
from pathlib import Path
from types import MappingProxyType

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.rotation import FileSeries
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.source import Source


class Recorder(RecordingWriter):
    """Writes what a live source receives, beginning at once; it need not have joined an engine yet.

    `levels`: service levels to store in the file.

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
        super().__init__(target, levels)
        self._source = source
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        # Subscribe before the snapshot: messages that are in both are written once.
        source.tap.attach(self._hand_over)
        self.start(source.history.snapshot())

    @property
    def elapsed_s(self) -> float:
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        return end_s - self._started_s

    def stop(self) -> None:
        """Finish the file. May be called twice."""
        self._let_go()
        self.close()

    def _hand_over(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if self.state == "recording":
            self.on_frame(topic, sequence, payload)
        else:  # it ended early: a full disk, or the engine restarted
            self._let_go()

    def _let_go(self) -> None:
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self._source.tap.detach(self._hand_over)
