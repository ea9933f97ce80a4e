"""`RecordingWriter`: a session into an MCAP file, on a thread of its own.

Whoever receives hands frames over and goes on; compressing, writing and whatever goes wrong there
happens here. While it is written the file is `PATH.part`; closing it gives it its name.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from mcap.writer import CompressionType, Writer

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
from stepscope.recordings.mcap_index import PART_SUFFIX, PROFILE, TOPICS, RecordingError
from stepscope.recordings.session import SessionState

log = logging.getLogger("stepscope.recordings")

CHUNK_BYTES = 256 * 1024
FLUSH_S = 1.0
KEYFRAME_NS = 5_000_000_000
MAX_QUEUE_BYTES = 128 * 1024 * 1024  # waiting for the disk

RecordingState: TypeAlias = Literal["recording", "finished", "failed"]

_KEYFRAME = wire.TOPICS[Snapshot]
_MARK = wire.TOPICS[Mark]
_Frame: TypeAlias = tuple[bytes, int, bytes]  # topic, sequence, payload


class RecordingWriter:
    """One file of one engine; it ends when the engine starts anew.

    Attributes:
        state, error: `failed` when the file cannot be written (full disk), and why in one line.
        num_bytes: of the file so far.
        num_queued_bytes: handed over and not written yet.
        first_step, last_step: in it.

    Args:
        path: of the file, replaced if there is one.

    Raises:
        RecordingError: the file cannot be made.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.state: RecordingState = "recording"
        self.error: str | None = None
        self.note: str | None = None  # why it ended by itself
        self.num_bytes = 0
        self.num_steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.part_path, "wb")  # noqa: SIM115 - closed by the thread
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror or error}") from error
        self._snapshot: Snapshot | None = None
        self._queue: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self.num_queued_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        # The writing thread's:
        self._session = SessionState()
        self._last_sequence: int | None = None
        self._needs_snapshot = False
        self._engine_id = ""
        self._anchor: EngineInfo | None = None  # pair of monotonic and wall time
        self._info: EngineInfo | None = None
        self._early: list[_Frame] = []  # before the engine is known, and ...
        self._early_ns: int | None = None  # ... the first time in them
        self._last_log_ns = 0
        self._next_keyframe_ns = 0
        self._channel_ids: dict[bytes, int] = {}

    @property
    def part_path(self) -> Path:
        return self.path.with_name(self.path.name + PART_SUFFIX)

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
            with self._stream as stream:
                writer = Writer(stream, CHUNK_BYTES, CompressionType.ZSTD)
                writer.start(PROFILE, library=f"stepscope {version('stepscope')}")
                for number, topic in enumerate(TOPICS, start=1):
                    channel_id = writer.register_channel(topic, "msgpack", schema_id=0)
                    assert channel_id == number
                    self._channel_ids[topic.encode()] = channel_id
                self._write_all(writer, stream.tell)
                writer.finish()  # type: ignore[no-untyped-call]
                self.num_bytes = stream.tell()
                stream.flush()
                os.fsync(stream.fileno())
            self.part_path.replace(self.path)
        except OSError as error:
            self._fail(f"cannot write {self.part_path}: {error.strerror or error}")
            return
        except Exception as error:
            # Ours to repair, but what is being recorded goes on.
            log.exception("recording to %s failed", self.part_path)
            self._fail(f"recording failed, see the log: {error!r}")
            return
        if self.state == "recording":
            self.state = "finished"

    def _write_all(self, writer: Writer, tell: Callable[[], int]) -> None:
        if self._snapshot is not None:
            self._write(writer, _KEYFRAME, self._snapshot.sequence, wire.encode(self._snapshot))
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
                self._write(writer, *item)
                if self.note is not None:
                    return
            if time.monotonic() >= next_flush_s:
                writer.flush()  # type: ignore[no-untyped-call]
                self.num_bytes = tell()
                next_flush_s = time.monotonic() + FLUSH_S

    def _write(self, writer: Writer, topic: bytes, sequence: int, payload: bytes) -> None:
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError:
            return  # the source has counted it already
        if self._anchor is None and not self._introduce(
            writer, message, (topic, sequence, payload)
        ):
            return
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and info.engine_id != self._engine_id:
            self.note = f"the engine started anew: the recording ends at step {self.last_step}"
            return
        if not self._is_next(topic, sequence):
            return
        log_ns = self._log_ns(message)
        is_first = self._session.info is None
        self._add(writer, topic, sequence, payload, log_ns)
        self._session.apply(message)
        if isinstance(message, StepRecord):
            self.num_steps += 1
            self.last_step = message.step
            if self.first_step is None:
                self.first_step = message.step
        if (isinstance(message, Snapshot) and not is_first) or (
            log_ns >= self._next_keyframe_ns and not self._needs_snapshot
        ):
            # One that came after a loss does not know what had finished by then; ours does.
            self._next_keyframe_ns = log_ns + KEYFRAME_NS
            if (snapshot := self._session.snapshot(sequence)) is not None:
                self._add(writer, _KEYFRAME, sequence, wire.encode(snapshot), log_ns)

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

    def _introduce(self, writer: Writer, message: Telemetry, frame: _Frame) -> bool:
        """Write who the engine is and what came before it was known.

        A snapshot tells all that is needed. Without one the file begins when the engine has said
        who it is and what time it has, with an empty keyframe.

        Returns:
            Whether `message` is still to be written.
        """
        if isinstance(message, Snapshot):
            self._early.clear()  # it contains them
            self._begin(writer, message.info, message.time_ns)
            return True
        self._early.append(frame)
        if isinstance(message, EngineInfo):
            self._info = message
        if self._early_ns is None:
            self._early_ns = _time_ns(message)
        if self._info is None or self._early_ns is None:
            return False
        self._begin(writer, self._info, self._early_ns)
        nothing = SessionState(info=self._info).snapshot(self._early[0][1] - 1)
        assert nothing is not None
        self._write(writer, _KEYFRAME, nothing.sequence, wire.encode(nothing))
        early, self._early = self._early, []
        for each in early:
            self._write(writer, *each)
        return False

    def _begin(self, writer: Writer, info: EngineInfo, time_ns: int) -> None:
        self._engine_id = info.engine_id
        self._anchor = info
        self._last_log_ns = info.wall_ns + time_ns - info.monotonic_ns
        self._next_keyframe_ns = self._last_log_ns + KEYFRAME_NS
        writer.add_metadata(
            PROFILE,
            {
                "schema_version": str(info.schema_version),
                "software_version": version("stepscope"),
                "engine_id": info.engine_id,
                "engine_name": info.name,
                "model": info.model,
                "started_wall_ns": str(time.time_ns()),
            },
        )

    def _add(
        self, writer: Writer, topic: bytes, sequence: int, payload: bytes, log_ns: int
    ) -> None:
        # MCAP has 32 bits for a sequence number; keyframes carry the whole of it.
        writer.add_message(
            self._channel_ids[topic], log_ns, payload, log_ns, sequence & 0xFFFF_FFFF
        )

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
