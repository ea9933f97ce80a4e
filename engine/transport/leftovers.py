"""What dead engines left in this user's runtime folder, and its removal when the next one starts.

Only a process that was killed leaves anything. An engine takes the lock of its address before
anything else and holds it for life, so a lock that is free belongs to a dead one. The sweep holds
each lock shared meanwhile: no engine can start there, and no reader thinks that the address is
taken.
"""

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.transport.endpoints import (
    LOCK_SUFFIX,
    TELEMETRY_SUFFIX,
    find_local,
    holder,
    runtime_dir,
    same_file,
)

KEPT_S = 24 * 3600.0
"""So long after its sockets were removed a lock still says who was killed (`killed_pid`)."""


def stale_files() -> list[Path]:
    """Files in the runtime folder that dead engines left behind."""
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
    """Remove the sockets of dead engines, and their locks a day later; never fails.

    What has no lock beside it, or one that no engine of this user wrote, stays: it is not ours.
    """
    with contextlib.suppress(ConfigError, OSError):
        for path in sorted(runtime_dir().glob("*" + LOCK_SUFFIX)):
            with contextlib.suppress(OSError):  # of a live engine, or gone since it was listed
                _sweep(path)


def _sweep(lock: Path) -> None:
    """Raises BlockingIOError where the engine lives, OSError where something cannot be removed."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not same_file(fd, lock):
            return  # a name that is used again since we opened it
        control = str(holder(fd).get("control", ""))
        base = str(lock).removesuffix(LOCK_SUFFIX)
        if control == f"ipc://{base}":
            sockets = [each for each in (base, base + TELEMETRY_SUFFIX) if _is_own_socket(each)]
            for each in sockets:
                os.unlink(each)
            if sockets:
                os.utime(fd)  # it is dead since now, as far as we know
                return
        elif not control.startswith("tcp://"):
            return
        if time.time() - status.st_mtime > KEPT_S:
            # Others that sweep may hold it shared; then it is theirs, or the next one's.
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
