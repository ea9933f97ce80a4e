"""`RecordingWriter`: a session into one file or a series of them, on a thread of its own.

Whoever receives hands frames over and goes on; compressing, writing and whatever goes wrong there
happens here. What the files look like inside is the business of `RecordingFile`.
"""

import logging
import queue
import threading
import time
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import (
    EngineInfo,
    EngineStatus,
    KnobsChanged,
    Mark,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.recording_file import RecordingFile
from stepscope.recordings.rotation import FileSeries
from stepscope.recordings.session import SessionState

log = logging.getLogger("stepscope.recordings")

FLUSH_S = 1.0  # what a crash may cost
CLEAN_S = 60.0
MAX_QUEUE_BYTES = 128 * 1024 * 1024  # waiting for the disk

RecordingState: TypeAlias = Literal["recording", "finished", "failed"]

_INFO = wire.TOPICS[EngineInfo]
_KEYFRAME = wire.TOPICS[Snapshot]
_MARK = wire.TOPICS[Mark]
_Frame: TypeAlias = tuple[bytes, int, bytes]  # topic, sequence, payload


class RecordingWriter:
    """Writes what one engine tells; it ends when the engine starts anew.

    A series goes on with the next engine, in a file of its own.

    Attributes:
        path: of the file that is being written, or was written last.
        state, error: `failed` when the file cannot be written (full disk), and why in one line.
        num_bytes, num_steps, num_files: written so far, in all files.
        num_safe_steps: of them, those that survive whatever happens to the process or the machine.
        num_queued_bytes: handed over and not written yet.
        first_step, last_step: of the engine that is being recorded, or was last.

    Args:
        target: a file, replaced if there is one, or a series of files.

    Raises:
        RecordingError: the file cannot be made.
    """

    def __init__(self, target: Path | str | FileSeries) -> None:
        self.state: RecordingState = "recording"
        self.error: str | None = None
        self.note: str | None = None  # why it ended by itself
        self.num_steps = self.num_safe_steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._series = target if isinstance(target, FileSeries) else None
        if isinstance(target, FileSeries):
            self._file = target.open_next()
        else:
            self._file = RecordingFile(Path(target))
        self.num_files = 1
        self._num_bytes_before = 0  # in the files before the current one
        self._snapshot: Snapshot | None = None
        self._queue: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self.num_queued_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        # The writing thread's:
        self._next_clean_s = 0.0
        self._expect_engine()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def part_path(self) -> Path:
        return self._file.part_path

    @property
    def num_bytes(self) -> int:
        return self._num_bytes_before + self._file.num_bytes

    def start(self, snapshot: Snapshot | None = None) -> None:
        """Begin to write, from `snapshot` on if there is one.

        Frames may have been handed over before; what the snapshot contains is left out.
        """
        self._snapshot = snapshot
        self._thread.start()

    def on_frame(self, topic: bytes, sequence: int, payload: bytes) -> None:
        """Hand over the next message. Never waits and never raises; from any thread."""
        if self.state != "recording":
            return
        with self._lock:
            self.num_queued_bytes += len(payload)
            is_over = self.num_queued_bytes > MAX_QUEUE_BYTES
        if is_over:
            self._fail(f"the disk is too slow: {MAX_QUEUE_BYTES >> 20} MiB wait to be written")
            return
        self._queue.put((topic, sequence, payload))

    def close(self) -> None:
        """Write what was handed over, finish the file and give it its name."""
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
            self._fail(f"cannot write {self.part_path}: {error.strerror or error}")
            self._file.abandon()
            return
        except Exception as error:
            # Ours to repair, but what is being recorded goes on.
            log.exception("recording to %s failed", self.part_path)
            self._fail(f"recording failed, see the log: {error!r}")
            self._file.abandon()
            return
        if self.state == "recording":
            self.state = "finished"

    def _write_all(self) -> None:
        if self._snapshot is not None:
            self._write(_KEYFRAME, self._snapshot.sequence, wire.encode(self._snapshot))
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
                    self.num_queued_bytes -= len(item[2])
                self._write(*item)
                if self.note is not None:
                    return
            if time.monotonic() >= next_flush_s:
                self._file.flush()
                self.num_safe_steps = self.num_steps
                if self._series is not None:
                    self._look_after(self._series)
                next_flush_s = time.monotonic() + FLUSH_S

    def _look_after(self, series: FileSeries) -> None:
        """Go on in the next file when this one is full, and delete what is too old."""
        if series.is_full(self._file) and self._anchor is not None and not self._needs_snapshot:
            self._next_file(series)
            self._begin_file()
            info = self._session.info
            snapshot = self._session.snapshot(self._last_sequence or 0)
            assert info is not None
            assert snapshot is not None
            for topic, message in ((_INFO, info), (_KEYFRAME, snapshot)):
                payload = wire.encode(message)
                self._file.add(topic, snapshot.sequence, payload, self._last_log_ns)
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

    def _expect_engine(self) -> None:
        """Know nothing yet of the engine that is to be recorded."""
        self._session = SessionState()
        self._last_sequence: int | None = None
        self._last_applied: int | None = None  # sequence the session is true after
        self._needs_snapshot = False
        self._engine_id = ""
        self._anchor: EngineInfo | None = None  # pair of monotonic and wall time
        self._info: EngineInfo | None = None
        self._early: list[_Frame] = []  # before the engine is known, and ...
        self._early_ns: int | None = None  # ... the first time in them
        self._last_log_ns = 0
        self.first_step = self.last_step = None

    def _write(self, topic: bytes, sequence: int, payload: bytes) -> None:
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError:
            return  # the source has counted it already
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and self._engine_id not in ("", info.engine_id):
            if self._series is None:
                at = f"the recording ends at step {self.last_step}"
                self.note = f"the engine started anew: {at}"
                return
            self._next_file(self._series)
            self._expect_engine()
        if self._anchor is None and not self._introduce(message, (topic, sequence, payload)):
            return
        if not self._is_next(topic, sequence):
            return
        self._file.end_chunk_if_full()
        is_first = self._session.info is None
        if self._file.wants_keyframe and not isinstance(message, Snapshot):
            self._add_keyframe()
        log_ns = self._log_ns(message)
        self._file.add(topic, sequence, payload, log_ns)
        self._session.apply(message)
        if topic != _MARK:
            self._last_applied = sequence
        if isinstance(message, StepRecord):
            self.num_steps += 1
            self.last_step = message.step
            if self.first_step is None:
                self.first_step = message.step
        if isinstance(message, Snapshot) and not is_first:
            # One that came after a loss does not know what had finished by then; ours does.
            self._add_keyframe()

    def _add_keyframe(self) -> None:
        """Write what is known after the last message, unless something is missing in it."""
        if self._needs_snapshot or self._last_applied is None:
            return
        if (snapshot := self._session.snapshot(self._last_applied)) is not None:
            payload = wire.encode(snapshot)
            self._file.add(_KEYFRAME, self._last_applied, payload, self._last_log_ns)

    def _is_next(self, topic: bytes, sequence: int) -> bool:
        """Whether a message belongs in the file: not one twice, no keyframe that tells nothing."""
        if topic == _MARK:
            return True
        last = self._last_sequence
        if topic == _KEYFRAME:
            if last is not None and sequence <= last and not self._needs_snapshot:
                return False
            self._needs_snapshot = False
        elif last is not None:
            if sequence <= last:
                return False
            if sequence > last + 1:
                self._needs_snapshot = True
        self._last_sequence = sequence if last is None else max(last, sequence)
        return True

    def _introduce(self, message: Telemetry, frame: _Frame) -> bool:
        """Write who the engine is and what came before it was known.

        A snapshot tells all that is needed. Without one the file begins when the engine has said
        who it is and what time it has, with an empty keyframe.

        Returns:
            Whether `message` is still to be written.
        """
        if isinstance(message, Snapshot):
            self._early.clear()  # it contains them
            self._begin(message.info, message.time_ns)
            return True
        self._early.append(frame)
        if isinstance(message, EngineInfo):
            self._info = message
        if self._early_ns is None:
            self._early_ns = _time_ns(message)
        if self._info is None or self._early_ns is None:
            return False
        self._begin(self._info, self._early_ns)
        nothing = SessionState(info=self._info).snapshot(self._early[0][1] - 1)
        assert nothing is not None
        self._write(_KEYFRAME, nothing.sequence, wire.encode(nothing))
        early, self._early = self._early, []
        for each in early:
            self._write(*each)
        return False

    def _begin(self, info: EngineInfo, time_ns: int) -> None:
        self._engine_id = info.engine_id
        self._anchor = info
        self._last_log_ns = info.wall_ns + time_ns - info.monotonic_ns
        self._begin_file()

    def _begin_file(self) -> None:
        assert self._anchor is not None
        self._file.begin(self._anchor, {} if self._series is None else self._series.metadata)

    def _log_ns(self, message: Telemetry) -> int:
        """Wall time of a message; never before that of the message ahead of it."""
        time_ns = _time_ns(message)
        if time_ns is not None and self._anchor is not None:
            wall_ns = self._anchor.wall_ns + time_ns - self._anchor.monotonic_ns
            self._last_log_ns = max(self._last_log_ns, wall_ns)
        return self._last_log_ns

    def _fail(self, reason: str) -> None:
        if self.state != "recording":
            return
        self.error = reason
        if self.last_step is not None:
            self.error += f" (steps {self.first_step:,} to about {self.last_step:,} are in it)"
        self.state = "failed"


def _time_ns(message: Telemetry) -> int | None:
    """When a message was true, None for those that hold at any time."""
    if isinstance(message, StepRecord):
        return message.tokens_ns
    return message.time_ns if isinstance(message, EngineStatus | KnobsChanged | Snapshot) else None
