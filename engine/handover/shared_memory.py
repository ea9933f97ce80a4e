"""Transfers keys and values between two engines on one machine, through a shared file in memory.

The prefill engine creates and owns the file. It holds the file's lock until it ends. An engine that
starts later removes files whose lock is free. The file begins with a stamp for each frame (the
content of one KV block). The stamp changes with the content. The decode engine checks the stamps
before and after it copies, so that it never uses a frame that was overwritten meanwhile.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stepscope.engine.protocol.commands import KVTicket
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import same_file

PREFIX = "stepscope-kv-"
_PAGE = 4096
_MOST_MAPPED = 8  # files to keep mapped, also after their engines have ended


class FrameCopier(Protocol):
    """Copies KV blocks as bytes, one frame per block. See `execution.kv_frames.KVFrames`."""

    layout: str
    frame_bytes: int

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None: ...
    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None: ...


def folder() -> Path:
    """Return the folder for the files. It is in memory, but without /dev/shm it may be on disk."""
    in_memory = Path("/dev/shm")
    return in_memory if in_memory.is_dir() else Path(tempfile.gettempdir())


def sweep() -> None:
    """Remove files that were left by killed engines of this user. Never fails."""
    with contextlib.suppress(OSError):
        for path in folder().glob(PREFIX + "*"):
            with contextlib.suppress(OSError):  # a live engine or another user owns it
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_uid == os.getuid():
                        path.unlink()
                finally:
                    os.close(fd)


class SharedMemorySender:
    """Of the prefill engine: makes the file (ConfigError if there is no memory), writes blocks.

    Use it on the engine's thread.
    """

    def __init__(self, frames: FrameCopier, num_frames: int) -> None:
        self._frames = frames
        self._next_stamp = 1
        self._fd, self._path = _new_file()
        size = _head_bytes(num_frames) + num_frames * frames.frame_bytes
        try:
            if hasattr(os, "posix_fallocate"):
                # Reserve all memory now: running out later would kill the process.
                os.posix_fallocate(self._fd, 0, size)
            else:
                os.truncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except OSError as error:
            self._remove()
            raise ConfigError(
                "transfer_memory",
                f"{self._path.parent} has no room for {size / 1e6:,.0f} MB of keys and values "
                f"({error.strerror}): lower transfer_memory or max_model_len there, or give it "
                "more (of a container: --shm-size)",
            ) from None
        self._free = list(range(num_frames))
        view = memoryview(self._map)
        self._stamps = view[: 8 * (num_frames + 1)].cast("Q")
        self._stamps[0] = num_frames
        self._memory = view[_head_bytes(num_frames) :]

    def put(self, blocks: Sequence[int]) -> KVTicket | None:
        """Copy the content of KV blocks for the other engine, and return the ticket of the copy."""
        if len(blocks) > len(self._free):
            return None
        frames = [self._free.pop() for _ in blocks]
        self._frames.store(blocks, self._memory, frames)
        stamp = self._next_stamp
        self._next_stamp += 1
        for frame in frames:
            self._stamps[1 + frame] = stamp
        return KVTicket(
            file=self._path.name, layout=self._frames.layout, frames=frames, stamp=stamp
        )

    def free(self, ticket: KVTicket) -> None:
        """Free a copy. Call it once the copy was loaded, or never will be."""
        for frame in ticket.frames:
            self._stamps[1 + frame] = 0
        self._free += ticket.frames

    def close(self) -> None:
        self._stamps.release()
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        self._remove()

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


class _MappedFile:
    def __init__(self, name: str, frame_bytes: int) -> None:
        """Map the file. Raises OSError or ValueError if it is not one of a prefill engine."""
        fd = os.open(folder() / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                raise ValueError("it belongs to another user")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # no page fault in a step
            mapped = mmap.mmap(fd, status.st_size, flags=flags, prot=mmap.PROT_READ)
            view = memoryview(mapped)
        finally:
            os.close(fd)
        self.num_frames = int.from_bytes(view[:8], "little")
        head_bytes = _head_bytes(self.num_frames)
        if status.st_size != head_bytes + self.num_frames * frame_bytes:
            raise ValueError("its size is not that of its frames")
        self.stamps = view[: 8 * (self.num_frames + 1)].cast("Q")
        self.memory = view[head_bytes:]

    def holds(self, ticket: KVTicket) -> bool:
        return all(
            frame < self.num_frames and self.stamps[1 + frame] == ticket.stamp
            for frame in ticket.frames
        )


@dataclass(eq=False)
class SharedMemoryReceiver:
    """Used by the decode engine: loads KV blocks from files of prefill engines."""

    frames: FrameCopier
    block_size: int
    _mapped: OrderedDict[str, _MappedFile] = field(default_factory=OrderedDict)

    def check(self, ticket: KVTicket, num_tokens: int) -> None:
        if ticket.layout != self.frames.layout:
            raise ConfigError(
                "kv_layout",
                "the prefill engine serves another model, or its KV blocks have another shape: "
                "start both with the same model, dtype, kv_cache_dtype and block_size",
            )
        num_blocks = -(-num_tokens // self.block_size)
        if len(ticket.frames) != num_blocks:
            raise ConfigError(
                "kv_ticket",
                f"{num_tokens} tokens lie in {num_blocks} blocks, not in {len(ticket.frames)}",
            )
        with contextlib.suppress(OSError, ValueError):  # then the tokens will be recomputed
            self._map(ticket.file)

    def load(self, ticket: KVTicket, blocks: Sequence[int], num_present: int) -> bool:
        try:
            mapped = self._map(ticket.file)
        except (OSError, ValueError):
            return False
        if not mapped.holds(ticket):
            return False
        if frames := ticket.frames[num_present:]:
            self.frames.load(mapped.memory, frames, blocks[num_present:])
        return mapped.holds(ticket)

    def _map(self, name: str) -> _MappedFile:
        mapped = self._mapped.get(name)
        if mapped is None:
            mapped = self._mapped[name] = _MappedFile(name, self.frames.frame_bytes)
            if len(self._mapped) > _MOST_MAPPED:
                self._mapped.popitem(last=False)
        return mapped


def _new_file() -> tuple[int, Path]:
    """Create a file with a new name and lock it. Returns its descriptor and path."""
    while True:
        path = folder() / f"{PREFIX}{uuid.uuid4().hex}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if same_file(fd, path):
            return fd, path
        os.close(fd)  # another engine's `sweep` removed it before it was locked


def _head_bytes(num_frames: int) -> int:
    return -(-8 * (num_frames + 1) // _PAGE) * _PAGE
