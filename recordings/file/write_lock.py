"""The lock on a file being written. It ends with the process that holds it."""

import contextlib
import fcntl
from pathlib import Path
from typing import IO


def take(stream: IO[bytes]) -> None:
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
