"""The lock on a recording that is being written: it goes with the process that holds it."""

import contextlib
import fcntl
from pathlib import Path
from typing import IO


def take(stream: IO[bytes]) -> None:
    """Say that a file is being written, until it is closed; where there are locks."""
    with contextlib.suppress(OSError):  # not every file system has them
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(stream: IO[bytes]) -> bool:
    """Whether somebody else is at work on an open file, in any process of this machine."""
    try:
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(stream, fcntl.LOCK_UN)
    return False


def is_being_written(path: Path) -> bool:
    """Whether somebody is at work on the file of that name."""
    try:
        with open(path, "rb") as stream:
            return is_held(stream)
    except OSError:
        return False
