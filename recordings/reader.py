"""`Recording`: a recorded session, read by seeking. It owns the open file.

Positions are found by bisecting the chunks; nothing is ever scanned from the beginning. A file that
was cut short is read as far as its chunks are whole, and says what is missing.
"""

import os
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from stepscope.engine.wire import EngineInfo, Snapshot
from stepscope.recordings.compatibility import check_info, check_metadata, decode_keyframe
from stepscope.recordings.loaded_chunk import KEYFRAME, STEP, Frame, LoadedChunk, step_of
from stepscope.recordings.mcap_chunk import first_messages, read_chunk
from stepscope.recordings.mcap_index import (
    PACKED_STEP,
    PART_SUFFIX,
    PROFILE,
    TOPICS,
    McapIndex,
    RecordingError,
    read_index,
)

REPAIR_HINT = "; 'stepscope repair' makes a whole file of it"
MAX_CHUNKS = 16  # kept decompressed

_STEP_TOPICS = (STEP, KEYFRAME, PACKED_STEP.encode())


class Position(NamedTuple):
    """Before which message to go on; positions compare in order of the file."""

    chunk: int
    message: int


class Recording:
    """A recording opened for reading; a context manager.

    Attributes:
        info: the engine that was recorded.
        opened_path: the file that was opened: of one that was never closed, its unfinished self.
        first_step, last_step: None when there is no step in it.
        start_ns, end_ns: wall time of the first and last message.
        truncated, message: whether something is missing, and what, in one line.

    Raises:
        RecordingError: no such file, not a recording, nothing in it, or of a later schema.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        part = self.path.with_name(self.path.name + PART_SUFFIX)
        self.opened_path = part if not self.path.exists() and part.exists() else self.path
        try:
            self._stream = open(self.opened_path, "rb")  # noqa: SIM115 - closed by close()
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
            check_metadata(self.metadata, self.path)
            self._chunks = index.chunks
            self._lock = threading.Lock()
            self._loaded: OrderedDict[int, LoadedChunk] = OrderedDict()
            self._damaged: set[int] = set()
            self._first_steps: dict[int, int | None] = {}
            self._index = index
            if not index.is_complete:
                self._mend_times()
            self.info = self._find_info()
            self.first_step = self._find_end_step(first=True)
            self.last_step = self._find_end_step(first=False)
            self.start_ns, self.end_ns = self._find_times()
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
        return not self._index.is_complete or bool(self._damaged)

    @property
    def message(self) -> str | None:
        """What is missing; damage in the middle is known once it has been read over."""
        parts = []
        if self._index.why_incomplete is not None:
            what = self._index.why_incomplete
            if not self._index.was_closed:
                end = "" if self.last_step is None else f" after step {self.last_step:,}"
                what += f"; what came{end} is missing"
            if self._index.num_lost_bytes:
                what += f" ({self._index.num_lost_bytes:,} bytes unreadable)"
            parts.append(what + REPAIR_HINT)
        if self._damaged:
            parts.append(f"{len(self._damaged)} of {len(self._chunks)} chunks are damaged")
        return f"{self.path.name}: {'; '.join(parts)}" if parts else None

    @property
    def index(self) -> McapIndex:
        """What the file is made of."""
        return self._index

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return os.fstat(self._stream.fileno()).st_size

    def chunk_frames(self, number: int) -> list[Frame]:
        """What can be read of a chunk; steps as they lie in the file, maybe packed."""
        return self._load(number).frames

    def steps_in(self, number: int) -> tuple[int, int] | None:
        """The first and last step that can be read in a chunk."""
        chunk = self._load(number)
        if not chunk.step_places:
            return None
        return _step_at(chunk, chunk.step_places[0]), _step_at(chunk, chunk.step_places[-1])

    def check_chunk(self, number: int) -> bool:
        """Read a chunk; whether it is as it was written."""
        self._load(number)
        return number not in self._damaged and not self._chunks[number].is_cut

    # Finding

    def find_step(self, step: int) -> Position | None:
        """Just after the record of `step`, or of the last one before it; None before the first."""
        for number in range(self._num_chunks_up_to(step) - 1, -1, -1):
            chunk = self._load(number)
            count = bisect_right(
                chunk.step_places,
                step,
                key=lambda place: _step_at(chunk, place),
            )
            if count:
                return Position(number, chunk.step_places[count - 1] + 1)
        return None

    def find_time(self, log_ns: int) -> Position:
        """Before the first message that is not earlier than `log_ns` (wall time)."""
        number = bisect_left(self._chunks, log_ns, key=lambda place: place.end_ns)
        if number == len(self._chunks):
            return Position(number, 0)
        frames = self._load(number).frames
        return Position(number, bisect_left(frames, log_ns, key=lambda frame: frame.log_ns))

    def frame_before(self, position: Position) -> Frame | None:
        """The message just before a position."""
        for number in range(min(position.chunk, len(self._chunks) - 1), -1, -1):
            chunk = self._load(number)
            end = min(position.message, len(chunk)) if number == position.chunk else len(chunk)
            if end:
                return chunk.frame(end - 1)
        return None

    def keyframe_before(self, position: Position) -> tuple[Snapshot, Position]:
        """The last keyframe before a position (or the first there is), and the position after it.

        Raises:
            RecordingError: no keyframe can be read.
        """
        for number in range(min(position.chunk, len(self._chunks) - 1), -1, -1):
            frames = self._load(number).frames
            end = min(position.message, len(frames)) if number == position.chunk else len(frames)
            for place in range(end - 1, -1, -1):
                if frames[place].topic == KEYFRAME:
                    return self._snapshot(frames[place]), Position(number, place + 1)
        if (found := self._first_keyframe()) is None:
            raise RecordingError(f"{self.path} holds no keyframe that can be read")
        return found

    def frames(
        self, position: Position | None = None, sequence: int = 0
    ) -> Iterator[tuple[Frame, Position]]:
        """Messages in order from a position (None: all), each with the position after it.

        Args:
            sequence: of the message before: the file holds the lower 32 bits of each only.
        """
        first, skipped = position or Position(0, 0)
        for number in range(first, len(self._chunks)):
            chunk = self._load(number)
            for place in range(skipped if number == first else 0, len(chunk)):
                frame = chunk.frame(place)
                if frame is None:
                    self._damaged.add(number)
                    continue
                ahead = (frame.sequence - sequence) & 0xFFFF_FFFF
                sequence += ahead if ahead < 1 << 31 else ahead - (1 << 32)
                yield frame._replace(sequence=sequence), Position(number, place + 1)

    # Inside

    def _find_info(self) -> EngineInfo:
        found = self._first_keyframe()
        if found is None:
            raise RecordingError(
                f"{self.path} holds nothing to show: no engine was heard while it was written, or "
                "it was cut short before its first second was over"
            )
        info = found[0].info
        check_info(info, self.path)
        return info

    def _first_keyframe(self) -> tuple[Snapshot, Position] | None:
        for number in range(len(self._chunks)):
            for place, frame in enumerate(self._load(number).frames):
                if frame.topic == KEYFRAME:
                    return self._snapshot(frame), Position(number, place + 1)
        return None

    def _snapshot(self, frame: Frame) -> Snapshot:
        return decode_keyframe(frame.payload, self.path)

    def _mend_times(self) -> None:
        """Heads of chunks have no checksum: where they contradict each other, look inside."""
        last_ns = 0
        for number, place in enumerate(self._chunks):
            if place.is_cut or not last_ns <= place.start_ns <= place.end_ns:
                frames = self._load(number).frames
                place.start_ns = frames[0].log_ns if frames else last_ns
                place.end_ns = frames[-1].log_ns if frames else last_ns
            last_ns = place.end_ns

    def _find_end_step(self, *, first: bool) -> int | None:
        numbers = range(len(self._chunks))
        for number in numbers if first else reversed(numbers):
            chunk = self._load(number)
            for place in chunk.step_places if first else reversed(chunk.step_places):
                if (step := step_of(chunk.frames[place].payload)) is not None:
                    return step
        return None

    def _find_times(self) -> tuple[int, int]:
        """Of the first and the last message: what the heads of chunks say has no checksum."""
        first, last = self._load(0).frames, self._load(len(self._chunks) - 1).frames
        return (
            first[0].log_ns if first else self._chunks[0].start_ns,
            last[-1].log_ns if last else self._chunks[-1].end_ns,
        )

    def _num_chunks_up_to(self, step: int) -> int:
        """How many chunks begin at or before a step. Looks into few: steps are spread evenly."""
        num_chunks = len(self._chunks)
        first, last = self.first_step or 0, self.last_step or 0
        share = (step - first) / max(1, last - first)
        low = high = min(max(0, round(share * num_chunks)), num_chunks)
        width = 1
        while low > 0 and self._first_step_from(low - 1) > step:
            high = low
            low = max(0, low - width)
            width *= 2
        while high < num_chunks and self._first_step_from(high) <= step:
            low = high
            high = min(num_chunks, high + width)
            width *= 2
        return bisect_right(range(num_chunks), step, low, high, key=self._first_step_from)

    def _first_step_from(self, number: int) -> int:
        """Where steps begin in a chunk (or in those after it): none of it is earlier."""
        for chunk in range(number, len(self._chunks)):
            if chunk not in self._first_steps:
                self._first_steps[chunk] = self._peek(chunk)
            if (step := self._first_steps[chunk]) is not None:
                return step
        return sys.maxsize

    def _peek(self, number: int) -> int | None:
        """The first step of a chunk; a keyframe at its beginning tells without going further."""
        with self._lock:
            for message in first_messages(self._stream, self._chunks[number]):
                topic = TOPICS[message.channel_id - 1] if message.channel_id <= len(TOPICS) else ""
                if topic.encode() in _STEP_TOPICS:
                    step = step_of(message.payload)
                    return step if step is None or topic.encode() != KEYFRAME else step + 1
        return None

    def _load(self, number: int) -> LoadedChunk:
        with self._lock:
            if number in self._loaded:
                self._loaded.move_to_end(number)
                return self._loaded[number]
            place = self._chunks[number]
            records, is_damaged = read_chunk(self._stream, place)
            if is_damaged and not place.is_cut:
                self._damaged.add(number)
            chunk = self._loaded[number] = LoadedChunk(records)
            if len(self._loaded) > MAX_CHUNKS:
                self._loaded.popitem(last=False)
            return chunk


def _step_at(chunk: LoadedChunk, place: int) -> int:
    step = step_of(chunk.frames[place].payload)
    return -1 if step is None else step
