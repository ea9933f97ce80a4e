"""Which engines have, or had, an address on this machine, by their lock files; `sweep` cleans up.

The engine holds the lock while it runs. A lock file that no process holds was left by an engine
that was killed. While `sweep` works on an address, it holds the lock shared: no engine can start
there, and no client that reads the lock thinks that the address is taken.
"""

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport import endpoints
from stepscope.engine.transport.endpoints import LOCK_SUFFIX, Endpoint, LockFields, lock_path
from stepscope.engine.transport.keys import Credentials, KeyPair

_LISTENS_S = 0.5


def called(endpoint: Endpoint) -> str:
    return _running(endpoint).name or endpoint.name


def holder_pid(endpoint: Endpoint) -> int | None:
    """Return the process id of this user's engine at an endpoint on this machine, else None."""
    return _running(endpoint).pid


def starting_pid(endpoint: Endpoint) -> int | None:
    """Return the pid of this user's engine here if it does not listen yet, else None."""
    pid = holder_pid(endpoint)
    if pid is None:
        return None
    if (path := endpoint.path) is not None:
        return None if path.exists() else pid
    return pid if _refuses(endpoint.here) else None


def killed_pid(endpoint: Endpoint) -> int | None:
    """Return the process id of the last engine at an endpoint here, if it was killed; else None."""
    fields, is_held = _written(endpoint)
    return None if is_held else fields.pid


def is_refused(endpoint: Endpoint) -> bool:
    """Whether nothing listens at an endpoint, and no engine of this user here is starting."""
    return not _running(endpoint).control and _refuses(endpoint)


def _refuses(endpoint: Endpoint) -> bool:
    try:
        if (path := endpoint.path) is not None:
            with socket.socket(socket.AF_UNIX) as unix:
                unix.settimeout(_LISTENS_S)
                unix.connect(str(path))
        else:
            host, _, port = endpoint.control.removeprefix("tcp://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def local_credentials(endpoint: Endpoint) -> tuple[bool, Credentials | None]:
    """Return whether an engine of this user holds an endpoint here, and the key to it."""
    fields = _running(endpoint)
    if not fields.secret:
        return bool(fields.control), None
    return True, Credentials(KeyPair(fields.public, fields.secret), fields.server, "local")


def _running(endpoint: Endpoint) -> LockFields:
    """Read the lock file of this user's running engine at an endpoint here; else empty."""
    fields, is_held = _written(endpoint)
    return fields if is_held else LockFields()


def _written(endpoint: Endpoint) -> tuple[LockFields, bool]:
    """Read the lock file at an endpoint here, and whether an engine holds the lock."""
    try:
        fields, is_held = endpoints.read_lock(lock_path(endpoint))
    except ConfigError:
        return LockFields(), False
    # If `control` differs, that engine has the same port at another address.
    return (fields if fields.control == endpoint.here.control else LockFields()), is_held


def sweep() -> None:
    """Remove the files of dead engines, by the lock files of this user's. Never fails."""
    with contextlib.suppress(ConfigError, OSError):
        for path in sorted(endpoints.runtime_dir().glob("*" + LOCK_SUFFIX)):
            with contextlib.suppress(OSError):  # the engine is alive, or the file is gone meanwhile
                _sweep(path)


def _sweep(lock: Path) -> None:
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not endpoints.same_file(fd, lock):
            return  # another file has this name since we opened it
        control = endpoints.holder(fd).control
        if control != f"ipc://{str(lock).removesuffix(LOCK_SUFFIX)}" and control[:6] != "tcp://":
            return
        for each in endpoints.sockets(Endpoint(control)):
            if each.is_socket() and not each.is_symlink():
                each.unlink()
        # Fails if another sweep holds the lock shared; that one, or a later one, removes it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if endpoints.same_file(fd, lock):
            os.unlink(lock)
    finally:
        os.close(fd)
