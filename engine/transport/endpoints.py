"""Where engines listen on this machine: addresses, the runtime folder, and the locks on addresses.

An endpoint is the address of the control socket. The address of the telemetry socket follows from
it (`PATH.telemetry`, or the next TCP port).

Binding an `ipc` address takes it away from the process that has it. So an engine holds a lock file
for as long as it runs: the lock tells the files of a running engine from those of a dead one.

Each rank of a data-parallel vLLM has an endpoint: `NAME.dp0`, `NAME.dp1` and so on. The ranks of a
dense model are separate engines: rank 0 knows of no others, so its endpoint is NAME.
"""

import fcntl
import ipaddress
import os
import re
import stat
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import platformdirs
from msgspec import Struct

from stepscope.engine.protocol.knobs import ConfigError, WrongValue
from stepscope.engine.transport.keys import Credentials

MAX_IPC_PATH = 103  # sun_path holds 108 bytes on Linux and 104 on macOS
TELEMETRY_SUFFIX = ".telemetry"
LOCK_SUFFIX = ".lock"
REPORTS_SUFFIX = ".reports"
_SUFFIXES = (TELEMETRY_SUFFIX, LOCK_SUFFIX, REPORTS_SUFFIX)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_TCP = re.compile(r"tcp://(?:\*|[\w.%-]+|\[[\w:.%]+\]):(\d{1,5})", re.ASCII)
_RANK = re.compile(r"(?P<group>.+)\.dp(?P<rank>\d+)")
_HERE = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]", "localhost": "127.0.0.1"}


def runtime_dir() -> Path:
    """Return the user's own folder for sockets (mode 0700). Raises ConfigError if not theirs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns if XDG_RUNTIME_DIR is not set
            path = platformdirs.user_runtime_path("stepscope")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        what = f"no folder for sockets can be made ({error.strerror})"
        advice = "set XDG_RUNTIME_DIR to a folder that is yours alone (mode 0700)"
        raise ConfigError("runtime_dir", f"{what}: {advice}") from error
    if status.st_uid != os.getuid():
        raise ConfigError("runtime_dir", f"{path} belongs to another user; set XDG_RUNTIME_DIR")
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an engine's control socket (a ZeroMQ address)."""

    control: str
    credentials: Credentials | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Make an endpoint from `ipc://PATH`, `tcp://HOST:PORT`, a path, or a local engine's name.

        Raises:
            WrongValue: `text` is none of these, or the last part of the path cannot be a name.
            ConfigError: the path is too long.
        """
        text = text.strip()
        if text.startswith("tcp://"):
            match = _TCP.fullmatch(text)
            if match is None or not 0 < int(match[1]) < 65535:
                what = "tcp://HOST:PORT with a port of 1..65534"
                raise WrongValue("bad_endpoint", f"{text!r} is not {what}")
            return cls(text)
        path = text.removeprefix("ipc://")
        if not path or "://" in path:
            what = "ipc://PATH, tcp://HOST:PORT or an engine's name"
            raise WrongValue("bad_endpoint", f"{text!r} is not {what}")
        full = Path(path).absolute() if "/" in path else runtime_dir() / path
        too_long = len(os.fsencode(full)) + len(TELEMETRY_SUFFIX) - MAX_IPC_PATH
        if too_long > 0:
            advice = f"shorten the name or the path by {too_long} bytes"
            advice += "" if "/" in path else ", or set XDG_RUNTIME_DIR to a shorter one"
            raise ConfigError("bad_endpoint", f"{full} is too long for a socket: {advice}")
        check_name(full.name if "/" in path else path)
        if not path.isprintable():
            raise WrongValue("bad_endpoint", f"{path!r} holds characters that cannot be printed")
        return cls(f"ipc://{full}")

    @property
    def path(self) -> Path | None:
        """The socket file; None for TCP."""
        return Path(self.control.removeprefix("ipc://")) if self.is_ipc else None

    @property
    def is_ipc(self) -> bool:
        return self.control.startswith("ipc://")

    @property
    def telemetry(self) -> str:
        if self.is_ipc:
            return self.control + TELEMETRY_SUFFIX
        host, _, port = self.control.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @property
    def name(self) -> str:
        path = self.path
        return path.name if path else self.control.removeprefix("tcp://")

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the endpoint."""
        if self.is_ipc:
            return True
        host = self.control.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def here(self) -> "Endpoint":
        """This endpoint, with the address that clients on the engine's own machine connect to."""
        host, _, port = self.control.removeprefix("tcp://").rpartition(":")
        if self.is_ipc or host not in _HERE:
            return self
        return Endpoint(f"tcp://{_HERE[host]}:{port}")


class LockFields(Struct, omit_defaults=True):
    """What an engine writes into its lock file; without `control`: nothing yet."""

    pid: int | None = None
    control: str = ""
    name: str = ""  # if it is not the one in its address
    # The key for clients of this user on this machine, if the engine asks for keys.
    public: str = ""
    secret: str = ""
    server: str = ""

    def __repr__(self) -> str:  # without the secret
        return f"LockFields(pid={self.pid}, control={self.control!r})"


@dataclass(slots=True)
class EndpointLock:
    """Lock of an endpoint: only the engine that holds it may bind. A context manager.

    `local`: the key for clients of this user on this machine, who read it in the lock file.

    Raises ConfigError: on entering, if a running engine holds the lock.
    """

    endpoint: Endpoint
    local: Credentials | None = None
    name: str = ""
    advice: str = "give --endpoint or --name another one"
    path: Path = field(init=False)
    _fd: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.path = lock_path(self.endpoint)

    def __enter__(self) -> "EndpointLock":
        for path in sockets(self.endpoint):
            if path.exists() and not path.is_socket():
                what = f"{path} exists and is not a socket; choose another endpoint"
                raise ConfigError("bad_endpoint", what)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Try again for a while: `find_local` holds the lock for an instant, to see who has it.
        for _ in range(20):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = holder(self._fd)
                os.close(self._fd)
                time.sleep(0.02)
                continue
            if same_file(self._fd, self.path):
                break
            os.close(self._fd)  # the holder before us removed the file after we opened it
        else:
            who = f"an engine (pid {other.pid or '?'})"
            where = f"{self.endpoint.control}; stop it, or {self.advice}"
            raise ConfigError("endpoint_in_use", f"{who} is already on {where}")
        fields = LockFields(os.getpid(), self.endpoint.here.control, self.name)
        if (local := self.local) is not None:
            fields.public, fields.secret = local.pair.public, local.pair.secret
            fields.server = local.server
        os.ftruncate(self._fd, 0)
        os.fchmod(self._fd, 0o600)
        os.write(self._fd, msgspec.json.encode(fields))
        self._remove_sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_sockets()
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _remove_sockets(self) -> None:
        """Remove the endpoint's socket files, ours or those of a dead engine. Nothing else."""
        for path in sockets(self.endpoint):
            if path.is_socket():
                path.unlink(missing_ok=True)


def check_name(name: str) -> None:
    """Raise WrongValue if `name` cannot name an engine, and with it a file in a folder."""
    if not _NAME.fullmatch(name) or name.endswith(_SUFFIXES):
        raise WrongValue(
            "bad_name",
            f"{name!r} cannot name an engine: use letters (a-z), digits, '-', '_' and '.', at most "
            f"64, with no '-' or '.' at the start and no {' or '.join(_SUFFIXES)} at the end",
        )


def free_name() -> str:
    """Return the first of engine-0, engine-1, ... that no running engine has."""
    taken = {endpoint.name for endpoint in find_local()}
    return next(name for i in range(10_000) if (name := f"engine-{i}") not in taken)


def find_local() -> list[Endpoint]:
    """Return the endpoints of this user's engines that run on this machine, by name."""
    locks = map(read_lock, sorted(runtime_dir().glob("*" + LOCK_SUFFIX)))
    return [Endpoint(fields.control) for fields, is_held in locks if is_held and fields.control]


def lock_path(endpoint: Endpoint) -> Path:
    """Return the path of the file that the engine at an address keeps locked."""
    if (path := endpoint.path) is not None:
        return Path(str(path) + LOCK_SUFFIX)
    return runtime_dir() / f"tcp-{endpoint.control.rpartition(':')[2]}{LOCK_SUFFIX}"


def reports_path(endpoint: Endpoint) -> Path:
    """Return the path of the socket where the engine hears from its other processes."""
    return Path(str(lock_path(endpoint)).removesuffix(LOCK_SUFFIX) + REPORTS_SUFFIX)


def sockets(endpoint: Endpoint) -> list[Path]:
    reports, path = reports_path(endpoint), endpoint.path
    return [reports] if path is None else [path, Path(str(path) + TELEMETRY_SUFFIX), reports]


def read_lock(path: Path) -> tuple[LockFields, bool]:
    """Read this user's lock file: what its engine wrote, and whether that engine still runs."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return LockFields(), False
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return LockFields(), False
        is_held = False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        return holder(fd), is_held
    finally:
        os.close(fd)


def holder(fd: int) -> LockFields:
    """Read what an engine has written into its open lock file."""
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=LockFields)
    except msgspec.DecodeError:
        return LockFields()  # the engine is just writing them


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file `fd` is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def siblings_of(rank: Endpoint) -> list[Endpoint]:
    """Return the other ranks of a rank's data-parallel group that run on this machine."""
    match = _RANK.fullmatch(rank.control)
    group = rank.control if match is None else match["group"]
    return [each for each in ranks_of(group) if each.control != rank.control]


def ranks_of(text: str) -> list[Endpoint]:
    """Return the ranks of a data-parallel engine that run on this machine.

    `text` is `vllm-0` or an address like `ipc:///run/vllm`. Raises ConfigError: it is no endpoint.
    """
    group = Endpoint.parse(text)
    ranks: dict[int, Endpoint] = {}
    for found in find_local():
        if found.control == group.control:
            ranks[0] = found
        match = _RANK.fullmatch(found.control)
        if match is not None and match["group"] == group.control:
            ranks[int(match["rank"])] = found
    return [ranks[rank] for rank in sorted(ranks)] or [group]
