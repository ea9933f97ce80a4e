"""`ensure`: writes a folder of the user's cache once, and never leaves it half written."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from stepscope.engine.protocol.knobs import ConfigError

ABANDONED_S = 86_400.0
Check = Callable[[Path], None]


def ensure(name: str, what: str, write: Callable[[Path], None], check: Check) -> Path:
    """Return the folder `name` of the user's cache; write it first if it is missing or incomplete.

    Safe with several processes at once: each writes its own folder and moves it into place, and
    the first one wins.

    Args:
        write: makes the folder at a path that does not exist yet. It may also use the parent
            folder, which is removed afterwards.
        check: raises ConfigError if a folder is not a complete checkpoint.

    Raises ConfigError: the user's cache folder cannot be written.
    """
    folder = Path(platformdirs.user_cache_dir("stepscope")) / name
    if _is_whole(folder, check):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{name}-*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as scratch:
            made = Path(scratch) / name
            write(made)
            try:
                made.rename(folder)
            except OSError:
                if not _is_whole(folder, check):  # it is broken, for example half deleted
                    folder.rename(Path(scratch) / "broken")
                    made.rename(folder)
    except OSError as error:
        raise ConfigError(
            "cache",
            f"{what} cannot be written to {folder}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another folder",
        ) from None
    return folder


def _is_whole(folder: Path, check: Check) -> bool:
    if not folder.is_dir():
        return False
    try:
        check(folder)
    except ConfigError:
        return False
    return True
