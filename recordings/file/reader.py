"""`Recording`: a recorded session, read by seeking. It owns the open file.

It finds positions by bisecting the chunks and never scans from the beginning. It also reads a file
that was cut short, as far as its chunks are intact; `message` tells what is missing.

A recording of a later major version is refused, with what to install.
"""

import fcntl
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import SCHEMA_VERSION, EngineInfo, Snapshot
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file import chunk_cache
from stepscope.recordings.file.mcap.chunk import was_overwritten
from stepscope.recordings.file.mcap.format import FORMAT_VERSION, PART_SUFFIX, PROFILE
from stepscope.recordings.file.mcap.index import BEING_WRITTEN, McapIndex, read_index
from stepscope.recordings.state.clocks import known_since

REPAIR_HINT = "; 'stepscope verify --repair' makes a whole file of it"


class Position(NamedTuple):
    """A point between two messages, where reading can continue. Positions compare in file order."""

    chunk: int
    message: int


class Recording:
    """A recording opened for reading; a context manager.

    Raises RecordingError: the file does not exist, is no recording, is empty, or has a later
    schema.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        part = self.path.with_name(self.path.name + PART_SUFFIX)
        # The file that was opened; `PATH.part` if the file was never finished.
        self.opened_path = part if not self.path.exists() and part.exists() else self.path
        try:
            # Use it only while no other thread reads the recording.
            self.stream = open(self.opened_path, "rb")  # noqa: SIM115 - closed by close()
            # Check this before reading, so that a file finished in between is read as whole.
            is_being_written = is_held(self.stream)
            index = read_index(self.stream, is_being_written=is_being_written)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            if index is None and is_being_written:
                raise self._nothing_yet()
            if index is None or index.profile not in (None, PROFILE):
                empty = "" if self.size else ", but empty"
                raise RecordingError(
                    f"{path} is not a stepscope recording{empty}; logs and benchmark results that "
                    "can be read: docs/import.md"
                )
            self.metadata = index.metadata.get(PROFILE, {})
            self._check_versions()
            self.chunks = chunks = chunk_cache.ChunkCache(self.stream, index.chunks)
            self.index: McapIndex = index
            if not index.is_complete:
                chunks.mend_times()
            self.info = self._find_info()  # the engine that was recorded
            # Both are None if the file has no step.
            firsts = (chunks.load(number).end_steps()[0] for number in range(len(chunks)))
            self.first_step = next((step for step in firsts if step is not None), None)
            lasts = (chunks.load(number).end_steps()[1] for number in reversed(range(len(chunks))))
            self.last_step = next((step for step in lasts if step is not None), None)
            first, last = chunks.load(0).frames, chunks.load(len(chunks) - 1).frames
            self.end = Position(len(chunks) - 1, len(last))
            # Wall time of the first and last message.
            self.start_ns = first[0].log_ns if first else chunks.places[0].start_ns
            self.end_ns = last[-1].log_ns if last else chunks.places[-1].end_ns
        except RecordingError:
            self.stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stream.close()

    @property
    def truncated(self) -> bool:
        return not self.index.is_complete or bool(self.chunks.damaged)

    @property
    def message(self) -> str | None:
        """What is missing, why, and what helps, in one line; None if nothing.

        Damage is known only once it was read.
        """
        index, parts = self.index, []
        if index.why_incomplete is not None:
            what = index.why_incomplete
            end = "" if self.last_step is None else f" after step {self.last_step:,}"
            if index.is_being_written:
                what += f"; what comes{end} is not written yet"
            elif not index.was_closed:
                what += f"; what came{end} is missing"
            if index.num_lost_bytes:
                what += f" ({index.num_lost_bytes:,} bytes unreadable)"
            parts.append(what)
        if number := len(self.chunks.damaged):
            parts.append(
                f"{number} of {len(self.chunks)} chunks {'is' if number == 1 else 'are'} damaged; "
                "'stepscope verify' says what is missing"
            )
        hint = "" if index.is_being_written else REPAIR_HINT
        return f"{self.path.name}: {'; '.join(parts)}{hint}" if parts else None

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def size(self) -> int:
        """File size in bytes."""
        return os.fstat(self.stream.fileno()).st_size

    def check_chunk(self, number: int) -> bool:
        """Read a chunk. Returns whether it is undamaged."""
        self.chunks.load(number)
        if not (place := self.chunks.places[number]).is_cut:
            return number not in self.chunks.damaged
        is_last = number == len(self.chunks) - 1
        return is_last and self.index.is_being_written and not was_overwritten(self.stream, place)

    # Finding

    def find_step(self, step: int) -> Position | None:
        """The position after the record of `step`, or of the last step before it; None if none."""
        for number in range(self.chunks.num_up_to(step) - 1, -1, -1):
            chunk = self.chunks.load(number)
            count = bisect_right(chunk.step_places, step, key=lambda place: _step_at(chunk, place))
            if count:
                return Position(number, chunk.step_places[count - 1] + 1)
        return None

    def find_time(self, log_ns: int) -> Position:
        """The position of the first message at or after `log_ns` (wall time)."""
        number = bisect_left(self.chunks.places, log_ns, key=lambda place: place.end_ns)
        if number == len(self.chunks):
            return Position(number, 0)
        frames = self.chunks.load(number).frames
        return Position(number, bisect_left(frames, log_ns, key=lambda frame: frame.log_ns))

    def step_before(self, position: Position) -> int | None:
        """The last step before a position; None if there is none."""
        for _, chunk, end in self._chunks_before(position):
            if count := bisect_left(chunk.step_places, end):
                return _step_at(chunk, chunk.step_places[count - 1])
        return None

    def frame_before(self, position: Position) -> chunk_cache.MessageFrame | None:
        """The message right before a position; None if there is none, or if it is damaged."""
        for _, chunk, end in self._chunks_before(position):
            if end:
                return chunk.frame(end - 1)
        return None

    def keyframe_before(self, position: Position) -> tuple[Snapshot, Position]:
        """The last keyframe before a position, and the position after that keyframe.

        If there is none before the position, the first keyframe of the file.

        Raises RecordingError: no keyframe can be read.
        """
        for number, chunk, end in self._chunks_before(position):
            for place in range(end - 1, -1, -1):
                if chunk.frames.topics[place] == chunk_cache.KEYFRAME:
                    return self._snapshot(chunk.frames[place]), Position(number, place + 1)
        if (found := self._first_keyframe()) is None:
            raise RecordingError(f"{self.path} holds no keyframe that can be read")
        return found

    def frames(
        self, position: Position | None = None, sequence: int = 0
    ) -> Iterator[tuple[chunk_cache.MessageFrame, Position]]:
        """Yield messages in order from a position (None: all), each with the position after it.

        `sequence`: number of the message before the first one. It is needed because the file stores
        only the lower 32 bits of sequence numbers.
        """
        first, skipped = position or Position(0, 0)
        for number in range(first, len(self.chunks)):
            chunk = self.chunks.load(number)
            for place in range(skipped if number == first else 0, len(chunk)):
                frame = chunk.frame(place)
                if frame is None:
                    self.chunks.damaged.add(number)
                    continue
                topic, lower, log_ns, payload = frame
                sequence = whole_sequence(lower, sequence)
                whole = chunk_cache.MessageFrame(topic, sequence, log_ns, payload)
                yield whole, Position(number, place + 1)

    # Inside

    def _chunks_before(
        self, position: Position
    ) -> Iterator[tuple[int, chunk_cache.LoadedChunk, int]]:
        """Yield number, chunk and how many of its messages come before a position, last first."""
        for number in range(min(position.chunk, len(self.chunks) - 1), -1, -1):
            chunk = self.chunks.load(number)
            is_last = number == position.chunk
            yield number, chunk, min(position.message, len(chunk)) if is_last else len(chunk)

    def _check_versions(self) -> None:
        """Check from the metadata, before any message is decoded, that the file can be read."""
        for what, highest in (("schema", SCHEMA_VERSION), ("format", FORMAT_VERSION)):
            written = self.metadata.get(f"{what}_version", "")
            if written.isdecimal() and int(written) > highest:
                by = self.metadata.get("software_version", "a later version")
                raise RecordingError(
                    f"{self.path} has {what} {written} (written by stepscope {by}), this stepscope "
                    f"reads up to {highest}: install {by} or later"
                )

    def _find_info(self) -> EngineInfo:
        found = self._first_keyframe()
        if found is None and self.chunks.damaged:
            place = self.chunks.places[min(self.chunks.damaged)]
            raise RecordingError(
                f"{self.path} is damaged (the chunk at byte {place.offset:,}): no keyframe can be "
                "read, so nothing can be shown"
            )
        if found is None and self.index.is_being_written:
            raise self._nothing_yet()
        if found is None:
            raise RecordingError(
                f"{self.path} holds nothing to show: no engine sent anything while it was "
                "written, or it was cut short within its first second"
            )
        snapshot, _ = found
        # Engine time from which on all pauses are known: 0, or the time of the first keyframe if
        # the engine does not publish earlier pauses.
        self.known_since_ns = known_since(snapshot)
        return snapshot.info

    def _nothing_yet(self) -> RecordingError:
        return RecordingError(f"{self.path}: {BEING_WRITTEN}, and nothing can be read in it yet")

    def _first_keyframe(self) -> tuple[Snapshot, Position] | None:
        for number in range(len(self.chunks)):
            for place, frame in enumerate(self.chunks.load(number).frames):
                if frame.topic == chunk_cache.KEYFRAME:
                    return self._snapshot(frame), Position(number, place + 1)
        return None

    def _snapshot(self, frame: chunk_cache.MessageFrame) -> Snapshot:
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError as error:
            raise RecordingError(
                f"{self.path} holds a keyframe that cannot be decoded: {error}"
            ) from error
        if not isinstance(message, Snapshot):
            raise RecordingError(f"{self.path} holds a keyframe that is a {type(message).__name__}")
        return message


def is_held(stream: IO[bytes]) -> bool:
    """Whether another writer, in any process of this machine, holds the lock of an open file."""
    try:
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(stream, fcntl.LOCK_UN)
    return False


def is_being_written(path: Path) -> bool:
    """Whether a recorder is writing the file at this path."""
    try:
        with open(path, "rb") as stream:
            return is_held(stream)
    except OSError:
        return False


def whole_sequence(lower: int, before: int) -> int:
    """Restore a sequence number from its lower 32 bits and the number before it."""
    ahead = (lower - before) & 0xFFFF_FFFF
    return before + (ahead if ahead < 1 << 31 else ahead - (1 << 32))


def _step_at(chunk: chunk_cache.LoadedChunk, place: int) -> int:
    step = chunk_cache.step_of(chunk.frames[place].payload)
    return -1 if step is None else step
