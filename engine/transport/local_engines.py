"""Which engine holds an address on this machine, according to the address's lock file.

Clients read the file while the engine holds the lock. A lock file that no process holds was left by
an engine that was killed; it only tells which process that was.
"""

import fcntl
import os
import socket

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, holder, lock_path
from stepscope.engine.transport.keys import Credentials, KeyPair

_LISTENS_S = 0.5


def called(endpoint: Endpoint) -> str:
    """Name of the engine at an address; if it is not this user's or not here, from the address."""
    return str(_key_file_fields(endpoint).get("name") or endpoint.name)


def holder_pid(endpoint: Endpoint) -> int | None:
    """Process id of the engine at an address; None unless it is this user's, on this machine."""
    pid = _key_file_fields(endpoint).get("pid")
    return pid if isinstance(pid, int) else None


def starting_pid(endpoint: Endpoint) -> int | None:
    """Process id of the engine here that holds an endpoint but is still loading its model."""
    pid = holder_pid(endpoint)
    if pid is None:
        return None
    if (path := endpoint.path) is not None:
        return None if path.exists() else pid
    host, _, port = endpoint.here.control.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
    except ConnectionRefusedError:
        return pid
    except OSError:
        return None
    return None


def killed_pid(endpoint: Endpoint) -> int | None:
    """Process id of the engine that held an endpoint here last and was killed; None if none."""
    fields, is_held = _written(endpoint)
    pid = fields.get("pid")
    return pid if isinstance(pid, int) and not is_held else None


def is_refused(endpoint: Endpoint) -> bool:
    """Whether nothing listens at an address, here or elsewhere, so that its engine has ended."""
    if _key_file_fields(endpoint):
        return False
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
    """Whether an engine of this user holds an endpoint on this machine, and its key for us."""
    fields = _key_file_fields(endpoint)
    try:
        pair = KeyPair(str(fields["public"]), str(fields["secret"]))
        return True, Credentials(pair, str(fields["server"]), "local")
    except KeyError:
        return bool(fields), None


def _key_file_fields(endpoint: Endpoint) -> dict[str, object]:
    """Lock file fields of this user's live engine at an endpoint here; empty if there is none."""
    fields, is_held = _written(endpoint)
    return fields if is_held else {}


def _written(endpoint: Endpoint) -> tuple[dict[str, object], bool]:
    """Lock file fields of this user's last engine at an endpoint here; whether its lock is held."""
    try:
        fd = os.open(lock_path(endpoint), os.O_RDWR | os.O_CLOEXEC)
    except (ConfigError, OSError):
        return {}, False
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return {}, False
        is_held = _is_locked(fd)
        fields = holder(fd)
    finally:
        os.close(fd)
    # If `control` differs, that engine has the same port at another address.
    return (fields if fields.get("control") == endpoint.here.control else {}), is_held


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
