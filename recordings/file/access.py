"""Who may read a file, and who is writing it.

Only the owner may read a file that may contain prompts and outputs. The permissions are set when
the file is created, because a program that has opened a file can keep reading it after they change.
The lock on a file that is being written ends with the process that holds it.
"""

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import IO


def private(path: str, flags: int) -> int:
    """An `opener` for `open()` that creates files only the owner can read."""
    return os.open(path, flags, 0o600)


def share(stream: IO[bytes], path: Path) -> None:
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


def lock(stream: IO[bytes]) -> None:
    """Lock a file until it is closed, if the file system has locks."""
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
