"""`Recorder`: records what a live source receives, from now until it is stopped."""

import time
from collections.abc import Callable
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.rotation import FileSeries
from stepscope.recordings.file.writing.writer import RecordingState, RecordingWriter
from stepscope.recordings.history.source import Source


class Recorder:
    """Ties a `RecordingWriter` to a source. Starts at once.

    Args:
        source: live; not necessarily joined yet.
        target: a file, replaced if there is one, or a series of files.
        levels: gives those by which whoever opens the file is to judge it; asked once a second.

    Raises:
        RecordingError: the source is itself a recording, or `target` cannot be written.
    """

    def __init__(
        self,
        source: Source,
        target: Path | str | FileSeries,
        levels: Callable[[], Levels] = dict,
    ) -> None:
        if not source.is_live:
            raise RecordingError(f"{source.name} is a recording already")
        self._source = source
        self._writer = RecordingWriter(target, levels)
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        # First listen, then look: what comes between is in both, and the writer sorts it out.
        source.tap.attach(self._hand_over)
        self._writer.start(source.history.snapshot())

    @property
    def path(self) -> Path:
        """Of the file that is being written, or was written last."""
        return self._writer.path

    @property
    def num_files(self) -> int:
        return self._writer.num_files

    @property
    def state(self) -> RecordingState:
        return self._writer.state

    @property
    def error(self) -> str | None:
        """Why it failed, or ended by itself, in one line."""
        return self._writer.error or self._writer.note

    @property
    def elapsed_s(self) -> float:
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        return end_s - self._started_s

    @property
    def num_bytes(self) -> int:
        """Of all files; grows once a second."""
        return self._writer.num_bytes

    @property
    def num_steps(self) -> int:
        return self._writer.num_steps

    def stop(self) -> None:
        """Finish the file. Once is enough, twice does no harm."""
        self._let_go()
        self._writer.close()

    def _hand_over(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if self._writer.state == "recording":
            self._writer.on_frame(topic, sequence, payload)
        else:  # it ended by itself: a full disk, or the engine started anew
            self._let_go()

    def _let_go(self) -> None:
        """Nothing more is taken of the source."""
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self._source.tap.detach(self._hand_over)
