"""Writes a file either completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stepscope.recordings.errors import RecordingError

UNFINISHED_SUFFIX = ".exporting"


class MissingPackage(Exception):  # noqa: N818 - reads as what it is
    """A package that `what` needs is not installed; the message says how to get it."""

    def __init__(self, package: str, what: str) -> None:
        hint = f"pip install 'stepscope[export]' (or {package})"
        super().__init__(f"{what} needs the package {package}: {hint}")


@contextmanager
def writing(path: Path, *, replace: bool = False, is_private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a stream whose content becomes the file `path` if the block ends without an error.

    `is_private`: whether only the owner may read the file, whatever the umask.

    Raises RecordingError: the file exists, or cannot be written.
    """
    if path.exists() and not replace:
        raise RecordingError(f"{path} is there already; remove it or choose another name")
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if is_private else 0o666)

    try:
        if is_private:
            unfinished.unlink(missing_ok=True)  # a killed export may have left it with other rights
        with open(unfinished, "wb", opener=opener) as stream:
            yield stream
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # for example on a read-only file system
            unfinished.unlink(missing_ok=True)
        raise RecordingError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
