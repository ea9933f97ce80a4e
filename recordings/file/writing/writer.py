"""`RecordingWriter`: writes a session into one file or a series of files, on its own thread.

The receiving thread only hands messages over. Compression, writing and all their errors happen
here. `EngineLog` decides which messages a file contains, `RecordingFile` decides its layout.
"""

import contextlib
import logging
import queue
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, as_metadata
from stepscope.recordings.file.writing.engine_log import EngineLog
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.rotation import SERIES, FileSeries

log = logging.getLogger("stepscope.recordings")

FLUSH_S = 1.0  # most seconds that a crash may cost
CLEAN_S = 60.0
MAX_QUEUE_BYTES = 128 * 1024 * 1024  # most that may wait for the disk

RecordingState: TypeAlias = Literal["recording", "finished", "failed"]


class RecordingWriter:
    """Writes the messages of one engine, and ends when the engine restarts.

    If it writes a series, it continues with the restarted engine in a new file.

    Args:
        target: a file, replaced if it exists, or a series of files.
        levels: service levels to store in each file.

    Raises RecordingError: the file cannot be created.
    """

    def __init__(
        self, target: Path | str | FileSeries, levels: Levels = MappingProxyType({})
    ) -> None:
        self.state: RecordingState = "recording"  # failed: the file cannot be written (full disk)
        self.error: str | None = None  # why it failed or ended by itself, in one line
        self.num_steps = 0  # in all files, as is `num_bytes`
        self.last_step: int | None = None  # the last recorded step of the current or last engine
        self._series: FileSeries | None = None
        self._metadata = as_metadata(levels)
        if isinstance(target, FileSeries):
            self._series = target
            self._metadata[SERIES] = target.name
            self._file = target.open_next()
        else:
            self._file = RecordingFile(Path(target))
        self.num_files = 1
        self._num_bytes_before = 0  # in the files before the current one
        self._snapshot: Snapshot | None = None
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.num_queued_bytes = 0  # bytes handed over and not written yet
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        # Used by the writing thread only:
        self._next_clean_s = 0.0
        self._has_come = False  # whether any message came since the last `_look_after`
        self._why_ended: str | None = None
        self._log = EngineLog(self._file, self._metadata)

    @property
    def path(self) -> Path:
        """The file that is being written, or was written last."""
        return self._file.path

    @property
    def num_bytes(self) -> int:
        return self._num_bytes_before + self._file.num_bytes

    def start(self, snapshot: Snapshot | None = None) -> None:
        """Begin to write, starting with `snapshot` if there is one.

        Messages may be handed over before this call. Those that the snapshot contains are left out.
        """
        self._snapshot = snapshot
        self._thread.start()

    def on_frame(self, topic: bytes, sequence: int, payload: bytes) -> None:
        """Hand over the next message. Never waits and never raises. Any thread may call it."""
        if self.state != "recording":
            return
        with self._lock:
            self.num_queued_bytes += len(payload)
            is_over = self.num_queued_bytes > MAX_QUEUE_BYTES
        if is_over:
            self._fail(f"the disk is too slow: {MAX_QUEUE_BYTES >> 20} MiB wait to be written")
            return
        self._queue.put((sequence, payload))

    def close(self) -> None:
        """Write everything handed over, finish the file and give it its name."""
        if self._thread.ident is None:
            self.start()
        self._queue.put(None)
        self._thread.join()

    # The writing thread

    def _run(self) -> None:
        try:
            self._write_all()
            self._file.close()
        except OSError as error:
            self._file.abandon()
            part = self._file.part_path
            self._fail(f"cannot write {part}: {error.strerror or error}{_kept(part)}")
            return
        except RecordingError as error:  # the next file cannot be created; this one is finished
            self._fail(f"{error}{_kept(self.path)}")
            return
        except Exception as error:
            # This is a bug of ours, which must not stop the session that is recorded.
            log.exception("recording to %s failed", self.path)
            self._fail(f"recording failed, see the log: {error!r}")
            self._file.abandon()
            return
        if self.state == "recording":
            self.error = self._why_ended  # before `state`: its reader may begin anew
            self.state = "finished"
        elif self.error is not None:
            self.error += _kept(self.path)

    def _write_all(self) -> None:
        if self._snapshot is not None:
            self._write(self._snapshot.sequence, wire.encode(self._snapshot))
        next_flush_s = time.monotonic() + FLUSH_S
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, next_flush_s - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if item is None or self.state == "failed":
                    return
                with self._lock:
                    self.num_queued_bytes -= len(item[1])
                self._write(*item)
                if self._why_ended is not None:
                    return
            if time.monotonic() >= next_flush_s:
                self._file.flush()
                if self._series is not None:
                    self._look_after(self._series)
                next_flush_s = time.monotonic() + FLUSH_S

    def _look_after(self, series: FileSeries) -> None:
        """Begin the next file if the current one is full, and delete files that are too old.

        Only does so while messages come. Otherwise, during a weekend without an engine, files
        without a step would replace those that show how the engine ended.
        """
        if not self._has_come:
            return
        self._has_come = False
        if series.is_full(self._file) and self._log.can_go_on:
            self._next_file(series)
            self._log.go_on_in(self._file)
            self._next_clean_s = 0.0
        now_s = time.monotonic()
        if now_s >= self._next_clean_s:
            self._next_clean_s = now_s + CLEAN_S
            series.delete_old(self._file)

    def _next_file(self, series: FileSeries) -> None:
        self._file.close()
        self._num_bytes_before += self._file.num_bytes
        self._file = series.open_next()
        self.num_files += 1

    def _write(self, sequence: int, payload: bytes) -> None:
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError:
            return  # the source has already counted it as unreadable
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and self._log.engine_id not in ("", info.engine_id):
            if self._series is None:
                at = "without a step" if self.last_step is None else f"at step {self.last_step}"
                self._why_ended = f"the engine restarted: the recording ends {at}"
                return
            self._next_file(self._series)
            self._log = EngineLog(self._file, self._metadata)
        num_steps_before = self._log.num_steps
        self._log.append(message, sequence, payload)
        self._has_come = True
        self.num_steps += self._log.num_steps - num_steps_before
        self.last_step = self._log.last_step

    def _fail(self, reason: str) -> None:
        if self.state != "recording":
            return
        self.error = reason
        self.state = "failed"


def _kept(path: Path) -> str:
    """Text for which steps can be read from a file whose writing failed; "" if none."""
    with (
        contextlib.suppress(RecordingError, OSError, msgspec.DecodeError),
        Recording(path) as recording,
    ):
        first, last = recording.first_step, recording.last_step
        if first is not None and last is not None:
            return f" (steps {first:,} to {last:,} are in it)"
    return ""
