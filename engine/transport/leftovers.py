"""Removes the files that dead engines left in this user's runtime folder, when an engine starts.

Only a process that was killed leaves files. An engine takes the lock of its address before anything
else and holds it until it ends, so a free lock file belongs to a dead engine. While `sweep` works
on an address, it holds the lock shared: no engine can start there, and no client that reads the
lock thinks that the address is taken.
"""

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import (
    LOCK_SUFFIX,
    TELEMETRY_SUFFIX,
    find_local,
    holder,
    runtime_dir,
    same_file,
)

KEPT_S = 24 * 3600.0
"""How long a lock file is kept after its sockets were removed, to show who was killed
(`killed_pid`)."""


def stale_files() -> list[Path]:
    """Return the files in the runtime folder that dead engines left behind."""
    alive = {e.control for e in find_local()}
    stale = []
    for path in sorted(runtime_dir().iterdir()):
        base = str(path).removesuffix(LOCK_SUFFIX).removesuffix(TELEMETRY_SUFFIX)
        if f"ipc://{base}" in alive:
            continue
        if Path(base).name.startswith("tcp-") and any(
            control.endswith(":" + base.rpartition("-")[2]) for control in alive
        ):
            continue
        stale.append(path)
    return stale


def sweep() -> None:
    """Remove the sockets of dead engines, and their lock files a day later. Never fails.

    Keeps sockets that are not ours: those without a lock file, and those whose lock file is not by
    an engine of this user.
    """
    with contextlib.suppress(ConfigError, OSError):
        for path in sorted(runtime_dir().glob("*" + LOCK_SUFFIX)):
            with contextlib.suppress(OSError):  # the engine is alive, or the file is gone meanwhile
                _sweep(path)


def _sweep(lock: Path) -> None:
    """Remove what a dead engine left at one address."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not same_file(fd, lock):
            return  # another file has this name since we opened it
        control = str(holder(fd).get("control", ""))
        base = str(lock).removesuffix(LOCK_SUFFIX)
        if control == f"ipc://{base}":
            sockets = [each for each in (base, base + TELEMETRY_SUFFIX) if _is_own_socket(each)]
            for each in sockets:
                os.unlink(each)
            if sockets:
                os.utime(fd)  # the day of `KEPT_S` begins now
                return
        elif not control.startswith("tcp://"):
            return
        if time.time() - status.st_mtime > KEPT_S:
            # Fails if another sweep holds the lock shared; that one, or a later one, removes it.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(fd, lock):
                os.unlink(lock)
    finally:
        os.close(fd)


def _is_own_socket(path: str) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
