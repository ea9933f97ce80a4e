"""File permissions: only the owner may read a file that may contain prompts and outputs.

The permissions are set when the file is created, because a program that has opened a file can keep
reading it after its permissions change.
"""

import contextlib
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
