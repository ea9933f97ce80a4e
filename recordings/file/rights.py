"""Who may read a file that is made here: its owner alone, where prompts and outputs may be in it.

So from its first moment on: who has opened a file may go on reading it, whatever its rights become.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import IO


def private(path: str, flags: int) -> int:
    """An `opener` for `open()`: a file that it makes is for its owner alone."""
    return os.open(path, flags, 0o600)


def share(stream: IO[bytes], path: Path) -> None:
    """Give a private file the rights that any other new one gets where it lies.

    A file is made to see which these are: asking for the umask means to change it for a moment, for
    all threads. Where none can be made, and where files have no rights, they stay what they are.
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
