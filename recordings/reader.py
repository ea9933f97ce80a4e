"""`Recording`: a recorded session, read by seeking. It owns the open file.

Positions are found by bisecting the chunks; nothing is ever scanned from the beginning. A file that
was cut short is read as far as its chunks are whole, and says what is missing.
"""

import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import SCHEMA_VERSION, EngineInfo, Snapshot, StepRecord
from stepscope.recordings.mcap_index import (
    PART_SUFFIX,
    PROFILE,
    TOPICS,
    ChunkPlace,
    RecordingError,
    messages,
    read_chunk,
    read_index,
)

MAX_CHUNKS = 16  # kept decompressed

_STEP = TOPICS.index(wire.TOPICS[StepRecord].decode()) + 1
_KEYFRAME = TOPICS.index(wire.TOPICS[Snapshot].decode()) + 1


class Frame(NamedTuple):
    """One recorded message."""

    topic: bytes
    sequence: int
    log_ns: int  # wall time
    payload: bytes


class Position(NamedTuple):
    """Before which message to go on; positions compare in order of the file."""

    chunk: int
    message: int


class _StepHead(msgspec.Struct, tag_field="type", tag="StepRecord"):
    step: int


_step_head = msgspec.msgpack.Decoder(_StepHead)


class Recording:
    """A recording opened for reading; a context manager.

    Attributes:
        info: the engine that was recorded.
        first_step, last_step: None when there is no step in it.
        start_ns, end_ns: wall time of the first and last message.
        truncated, message: whether something is missing, and what, in one line.

    Raises:
        RecordingError: no such file, not a recording, nothing in it, or of a later schema.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        part = self.path.with_name(self.path.name + PART_SUFFIX)
        opened = part if not self.path.exists() and part.exists() else self.path
        try:
            self._stream = open(opened, "rb")  # noqa: SIM115 - closed by close()
            index = read_index(self._stream)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            if index is None or index.profile not in (None, PROFILE):
                raise RecordingError(
                    f"{path} is not a stepscope recording (an MCAP file written by 'stepscope "
                    "record')"
                )
            self.metadata = index.metadata.get(PROFILE, {})
            self._check_schema()
            self._chunks = index.chunks
            self._lock = threading.Lock()
            self._loaded: OrderedDict[int, list[Frame]] = OrderedDict()
            self._damaged: set[int] = set()
            self._first_steps: dict[int, int | None] = {}
            self._step_chunks = self._chunks_that_may_hold(_STEP)
            self._keyframe_chunks = self._chunks_that_may_hold(_KEYFRAME)
            self.info = self._find_info()
            self.first_step = self._find_end_step(first=True)
            self.last_step = self._find_end_step(first=False)
            self.start_ns = self._chunks[0].start_ns
            self.end_ns = max(chunk.end_ns for chunk in self._chunks)
            self._is_complete = index.is_complete
            self._num_lost_bytes = index.num_lost_bytes
        except RecordingError:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def truncated(self) -> bool:
        return not self._is_complete or bool(self._damaged)

    @property
    def message(self) -> str | None:
        """What is missing; damage in the middle is known once it has been read over."""
        parts = []
        if not self._is_complete:
            end = "" if self.last_step is None else f" after step {self.last_step:,}"
            parts.append(
                f"it was not closed (crash, full disk or cut copy); what came{end} is missing"
                + (f" ({self._num_lost_bytes:,} bytes unreadable)" if self._num_lost_bytes else "")
            )
        if self._damaged:
            parts.append(f"{len(self._damaged)} of {len(self._chunks)} chunks are damaged")
        return f"{self.path.name}: {'; '.join(parts)}" if parts else None

    # Finding

    def find_step(self, step: int) -> Position | None:
        """Just after the record of `step`, or of the last one before it; None before the first."""
        places = self._step_chunks
        low = bisect_right(range(len(places)), step, key=self._first_step_from)
        for place in reversed(places[:low]):
            found = None
            for number, frame in enumerate(self._load(place)):
                if frame.topic == b"step" and _step_head.decode(frame.payload).step <= step:
                    found = number
            if found is not None:
                return Position(place, found + 1)
        return None

    def find_time(self, log_ns: int) -> Position:
        """Before the first message that is not earlier than `log_ns` (wall time)."""
        chunk = bisect_left(self._chunks, log_ns, key=lambda place: place.end_ns)
        if chunk == len(self._chunks):
            return Position(chunk, 0)
        return Position(chunk, bisect_left(self._load(chunk), log_ns, key=lambda f: f.log_ns))

    def frame_before(self, position: Position) -> Frame | None:
        """The message just before a position."""
        for chunk in range(min(position.chunk, len(self._chunks) - 1), -1, -1):
            frames = self._load(chunk)
            if chunk == position.chunk:
                frames = frames[: position.message]
            if frames:
                return frames[-1]
        return None

    def keyframe_before(self, position: Position) -> tuple[Snapshot, Position]:
        """The last keyframe before a position (or the first there is), and the position after it.

        Raises:
            RecordingError: no keyframe can be read.
        """
        number = bisect_right(self._keyframe_chunks, position.chunk) - 1
        for chunk in reversed(self._keyframe_chunks[: number + 1]):
            frames = self._load(chunk)
            end = position.message if chunk == position.chunk else len(frames)
            for place in range(min(end, len(frames)) - 1, -1, -1):
                if frames[place].topic == b"keyframe":
                    return _snapshot(frames[place]), Position(chunk, place + 1)
        for chunk in self._keyframe_chunks:
            for place, frame in enumerate(self._load(chunk)):
                if frame.topic == b"keyframe":
                    return _snapshot(frame), Position(chunk, place + 1)
        raise RecordingError(f"{self.path} holds no keyframe that can be read")

    def frames(
        self, position: Position | None = None, sequence: int = 0
    ) -> Iterator[tuple[Frame, Position]]:
        """Messages in order from a position (None: all), each with the position after it.

        Args:
            sequence: of the message before: the file holds the lower 32 bits of each only.
        """
        first, skipped = position or Position(0, 0)
        for chunk in range(first, len(self._chunks)):
            frames = self._load(chunk)
            for place in range(skipped if chunk == first else 0, len(frames)):
                frame = frames[place]
                ahead = (frame.sequence - sequence) & 0xFFFF_FFFF
                sequence += ahead if ahead < 1 << 31 else ahead - (1 << 32)
                yield frame._replace(sequence=sequence), Position(chunk, place + 1)

    # Inside

    def _check_schema(self) -> None:
        written = self.metadata.get("schema_version", "")
        if written.isdigit() and int(written) > SCHEMA_VERSION:
            by = self.metadata.get("software_version", "a later version")
            raise RecordingError(
                f"{self.path} has schema {written} (written by stepscope {by}), this stepscope "
                f"reads up to {SCHEMA_VERSION}: install {by} or later"
            )

    def _chunks_that_may_hold(self, channel_id: int) -> list[int]:
        return [i for i, place in enumerate(self._chunks) if place.may_hold(channel_id)]

    def _find_info(self) -> EngineInfo:
        for chunk in self._keyframe_chunks:
            for frame in self._load(chunk):
                if frame.topic == b"keyframe":
                    return _snapshot(frame).info
        raise RecordingError(
            f"{self.path} holds nothing to show: no engine was heard while it was written, or it "
            "was cut short before its first second was over"
        )

    def _find_end_step(self, *, first: bool) -> int | None:
        for place in self._step_chunks if first else reversed(self._step_chunks):
            frames = self._load(place)
            for frame in frames if first else reversed(frames):
                if frame.topic == b"step":
                    return _step_head.decode(frame.payload).step
        return None

    def _first_step_from(self, number: int) -> int:
        """The first step in the chunk at `_step_chunks[number]`, or in those after it."""
        for chunk in self._step_chunks[number:]:
            if chunk not in self._first_steps:
                steps = (f.payload for f in self._load(chunk) if f.topic == b"step")
                payload = next(steps, None)
                step = None if payload is None else _step_head.decode(payload).step
                self._first_steps[chunk] = step
            if (step := self._first_steps[chunk]) is not None:
                return step
        return sys.maxsize

    def _load(self, chunk: int) -> list[Frame]:
        with self._lock:
            if chunk in self._loaded:
                self._loaded.move_to_end(chunk)
                return self._loaded[chunk]
            frames = self._read(self._chunks[chunk])
            if frames is None:
                self._damaged.add(chunk)
                frames = []
            self._loaded[chunk] = frames
            if len(self._loaded) > MAX_CHUNKS:
                self._loaded.popitem(last=False)
            return frames

    def _read(self, place: ChunkPlace) -> list[Frame] | None:
        records = read_chunk(self._stream, place)
        if records is None:
            return None
        return [
            Frame(TOPICS[channel_id - 1].encode(), sequence, log_ns, payload)
            for channel_id, sequence, log_ns, payload in messages(records)
            if 0 < channel_id <= len(TOPICS)
        ]


def _snapshot(frame: Frame) -> Snapshot:
    message = wire.decode(frame.payload)
    assert isinstance(message, Snapshot)
    return message
