"""`RecordingFile`: a file while it is written, as `PATH.part`. Closing it renames it to `PATH`."""

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.chunk_cache import KEYFRAME, STEP
from stepscope.recordings.file.mcap.format import (
    FORMAT_VERSION,
    PACKED_STEP,
    PART_SUFFIX,
    PROFILE,
    TOPICS,
    engine_metadata,
)
from stepscope.recordings.file.mcap.sink import McapSink
from stepscope.recordings.file.reader import is_being_written
from stepscope.recordings.packing import StepPacker

CHUNK_BYTES = 1024 * 1024  # uncompressed, unless half of it is keyframes
# One flipped bit costs the rest of its chunk. So a chunk spans at most a second, or if longer,
# 1/CHUNK_PARTS of the file so far, both in time and in steps. So chunks grow with the file, up to
# CHUNK_BYTES.
CHUNK_NS = 1_000_000_000
CHUNK_PARTS = 100
KEYFRAME_MESSAGES = 256  # most messages to read and apply to show any moment ...
# ... unless the keyframe itself is larger than these messages: with thousands of waiting requests
# it has megabytes. Then the messages between two keyframes have as many bytes as a keyframe, but
# are at most:
MAX_KEYFRAME_MESSAGES = 4096


class RecordingFile:
    """A file with the messages of one engine, from a keyframe on.

    Each chunk begins with a keyframe, so that it can be read without the chunks before it. It has
    no keyframe if the writer has none, or if the keyframe would be too large compared to the
    messages.

    Only the owner may read the file, unless `begin` finds that it will contain no prompts and
    outputs: a program that has opened a file can keep reading it after its permissions change. The
    lock on the file ends with the process that holds it.

    Args:
        path: path of the file, which is replaced if it exists. An existing `PATH.part` is never
            replaced: a recorder is writing it, or it is all that a killed recorder left.
        is_new: fail if `path` or `PATH.part` exists.

    Raises:
        RecordingError: the file cannot be created.
        FileExistsError: `is_new` is true and the file exists.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self._channel_ids = {topic.encode(): n for n, topic in enumerate(TOPICS, start=1)}
        self._packer = StepPacker()
        self._index: Callable[[], bytes] | None = None
        self._num_since_keyframe = 0
        self._num_bytes_since_keyframe = 0  # bytes of messages before packing
        self._num_keyframe_bytes = 0  # of the last keyframe, ...
        self._num_keyframe_bytes_in_chunk = 0  # ... and of all keyframes in this chunk
        self._num_chunk_bytes = 0  # of the last chunk that ended
        self._start_ns: int | None = None  # time of the first message, ...
        self._chunk_start_ns = 0  # ... and of the first message in this chunk
        self._num_steps = self._num_steps_in_chunk = 0
        if is_new and path.exists():
            raise FileExistsError(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(  # noqa: SIM115 - closed by close()
                self.part_path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)
            )
        except OSError as error:
            if isinstance(error, FileExistsError) and path.parent.is_dir():
                if is_new:
                    raise
                why = "a recorder was killed ('stepscope verify --repair' makes a whole file of it)"
                if is_being_written(self.part_path):
                    why = "another recorder is at work"
                raise RecordingError(
                    f"{self.part_path} is there: {why}; choose another name"
                ) from error
            raise RecordingError(f"cannot write {path}: {error.strerror or error}") from error
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._sink = McapSink(self._stream)
        self.opened_s = time.monotonic()

    @property
    def part_path(self) -> Path:
        return self.path.with_name(self.path.name + PART_SUFFIX)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that have been flushed."""
        return self._sink.num_bytes

    @property
    def wants_keyframe(self) -> bool:
        is_worth_it = (
            self._num_bytes_since_keyframe >= self._num_keyframe_bytes
            or self._num_since_keyframe >= MAX_KEYFRAME_MESSAGES
        )
        if not self._sink.num_chunk_bytes:
            return is_worth_it or self._num_keyframe_bytes <= self._num_chunk_bytes // 4
        return is_worth_it and self._num_since_keyframe >= KEYFRAME_MESSAGES

    def begin(
        self, info: EngineInfo, more: dict[str, str], index: Callable[[], bytes] | None = None
    ) -> None:
        """Write the metadata about the engine and the recorder, with the entries of `more`.

        `index`: called when a chunk ends; returns the index of its messages.
        """
        self._index = index
        if not info.with_tokens:
            _share(self._stream, self.part_path)
        self._packer = StepPacker(info.block_size)
        metadata = {
            **engine_metadata(info),
            "format_version": str(FORMAT_VERSION),
            "software_version": version("stepscope"),
            "started_wall_ns": str(time.time_ns()),
            **more,
        }
        self._sink.add_metadata(PROFILE, metadata)

    def add_metadata(self, name: str, values: Mapping[str, str]) -> None:
        """Add another metadata record. Call it after `begin`, not while a chunk is open."""
        self._sink.add_metadata(name, values)

    def add(self, topic: bytes, sequence: int, payload: bytes, log_ns: int) -> None:
        """Append a message to the open chunk, or to a new one. `log_ns` must never go back."""
        if self._start_ns is None:
            self._start_ns = log_ns
        if not self._sink.num_chunk_bytes:
            self._chunk_start_ns = log_ns
        self._num_bytes_since_keyframe += len(payload)
        if topic == KEYFRAME:
            self._packer.reset()
            self._num_since_keyframe = self._num_bytes_since_keyframe = 0
            self._num_keyframe_bytes = len(payload)
            self._num_keyframe_bytes_in_chunk += len(payload)
        elif topic == STEP:
            self._num_steps += 1
            self._num_steps_in_chunk += 1
            if (packed := self._packer.pack(payload)) is not None:
                topic, payload = PACKED_STEP.encode(), packed
        # MCAP has 32 bits for a sequence number. Keyframes contain all bits.
        self._sink.add(self._channel_ids[topic], sequence, log_ns, payload)
        self._num_since_keyframe += 1

    def end_chunk_if_full(self, log_ns: int) -> None:
        """End the chunk if it is full. Call it before adding a message with wall time `log_ns`.

        Afterwards `wants_keyframe` tells whether to add a keyframe first. `add` itself never ends a
        chunk.
        """
        num_bytes, num_steps = self._sink.num_chunk_bytes, self._num_steps_in_chunk
        is_full = num_bytes >= max(CHUNK_BYTES, 2 * self._num_keyframe_bytes_in_chunk)
        if num_steps and self._start_ns is not None and not is_full:
            chunk_ns, all_ns = log_ns - self._chunk_start_ns, log_ns - self._start_ns
            is_full = chunk_ns > CHUNK_NS and (
                chunk_ns * CHUNK_PARTS > all_ns or num_steps * CHUNK_PARTS > self._num_steps
            )
        if num_bytes and is_full:
            self.end_chunk()

    def end_chunk(self) -> None:
        self._packer.reset()
        self._num_keyframe_bytes_in_chunk = self._num_steps_in_chunk = 0
        if self._sink.num_chunk_bytes:
            self._num_chunk_bytes = self._sink.num_chunk_bytes
            self._sink.end_chunk(None if self._index is None else self._index())

    def flush(self) -> None:
        """Write all messages so far to the disk, so that they survive a crash of the machine."""
        self._sink.flush()

    def close(self) -> None:
        """Finish the file and rename it from `PATH.part` to `PATH`.

        Raises OSError: the file cannot be written; `part_path` contains what was written.
        """
        with self._stream:
            self.end_chunk()
            self._sink.finish()
        self.part_path.replace(self.path)
        _sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Close the file without finishing it. It stays as `PATH.part`."""
        with contextlib.suppress(OSError):  # writing has failed before
            self._stream.close()


def _share(stream: IO[bytes], path: Path) -> None:
    """Give a private file the permissions that a new file in its folder would have.

    It creates a file to find them out, because reading the umask would change it for all threads
    for a moment. If it cannot create one, or the file system has no permissions, nothing changes.
    """
    other = path.with_name(f".stepscope-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            rights = stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
            other.unlink()
        os.fchmod(stream.fileno(), rights)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that new file names in it survive a crash."""
    with contextlib.suppress(OSError):  # not every file system lets folders be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
