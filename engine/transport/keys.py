"""Keys: how they are made and stored, and which an engine lets in. Each is a pair for CURVE.

Secret halves are only in memory, and in files that only their owner can read. No `repr` shows a
secret, and no command takes one as an argument, because a list of processes would show it.
"""

import contextlib
import os
import re
import stat
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import platformdirs
import zmq

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.rate_limit import is_out_of_files

Role: TypeAlias = Literal["viewer", "operator"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_CLIENT_SUFFIX = ".key"
_SERVER = "server.key"
_SUFFIX = ".pub"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The public and the secret half of a key, in Z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> "KeyPair":
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client needs to connect: its own key pair, and the engine's public key."""

    pair: KeyPair
    server: str  # public key of the engine
    name: str = ""
    endpoint: str | None = None  # the endpoint that the key is for; None: any
    role: str = ""  # as the file says; the engine has its own list
    path: Path | None = None


class Holder(NamedTuple):
    """The holder of a key: name and role. A viewer may only read; an operator may do everything."""

    name: str
    role: Role
    public: str
    created: str = ""  # day, as YYYY-MM-DD


def write_credentials(path: Path, credentials: Credentials, role: str) -> None:
    """Write the only file that a client needs; `read_credentials` reads it."""
    comment = (
        f"# stepscope: the holder of this file is {credentials.name!r} ({role}) to the engine.\n"
        "# Its place: ~/.config/stepscope/keys/ (mode 0600), or --key FILE.\n"
    )
    pair, server = credentials.pair, credentials.server
    values = {"name": credentials.name, "role": role, "public": pair.public}
    values |= {"secret": pair.secret, "server": server}
    if credentials.endpoint is not None:
        values["endpoint"] = credentials.endpoint
    _write(path, values, comment)


def read_credentials(path: Path) -> Credentials:
    """Read a client's key file. Raises ConfigError: it is none, or other users can read it."""
    values = _read(path, is_secret=True)
    return Credentials(
        KeyPair(_key(values, "public", path), _key(values, "secret", path)),
        _key(values, "server", path),
        str(values.get("name", path.stem)),
        values.get("endpoint"),
        str(values.get("role", "")),
        path,
    )


def find_credentials(endpoint: str, *, is_remote: bool) -> Credentials | None:
    """Find the key for an endpoint in the client's key folder; None if there is none.

    A key that names the endpoint comes first. A key that names no endpoint is used for an engine on
    another machine, if it is the only such key.

    Raises ConfigError: several keys could be meant, or a file cannot be used.
    """
    folder = platformdirs.user_config_path("stepscope") / "keys"
    found = [read_credentials(path) for path in sorted(folder.glob("*" + _CLIENT_SUFFIX))]
    named = [each for each in found if each.endpoint == endpoint][:1]
    usable = named or [each for each in found if is_remote and each.endpoint is None]
    if len(usable) > 1:
        names = ", ".join(str(each.path) for each in usable)
        what = f"several keys could be meant for {endpoint}: {names}; add --key FILE"
        raise ConfigError("which_key", what)
    return usable[0] if usable else None


class KeyFolder:
    """The folder with an engine's own key pair (`server.key`) and the keys of clients it lets in.

    Each `NAME.pub` holds the public half of one client's key and its role. Deleting the file
    revokes the key, without a restart. The folder has mode 0700.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or platformdirs.user_config_path("stepscope") / "authorised-keys"

    def check(self) -> None:
        """Raise ConfigError if the folder is missing, or other users could put keys into it."""
        try:
            status = self.path.stat()
        except OSError as error:
            command = f"stepscope keys new NAME --role operator --keys {self.path}"
            what = f"{self.path}: {error.strerror}; '{command}' makes it with a first key"
            raise ConfigError("keys", what) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError("keys", f"{self.path} is no folder")
        _check_private(self.path, status)

    def server_pair(self) -> KeyPair:
        """Return the engine's own key pair; the first call makes it."""
        path = self.path / _SERVER
        if not path.exists():
            pair = KeyPair.new()
            comment = "# stepscope: the engine's own key. Clients know its public half.\n"
            _write(path, {"public": pair.public, "secret": pair.secret}, comment)
            return pair
        values = _read(path, is_secret=True)
        return KeyPair(_key(values, "public", path), _key(values, "secret", path))

    def holders(self, broken: list[str] | None = None) -> dict[str, Holder]:
        """Return the holders of all authorised keys, by public key, in the order of their names.

        `broken`: gets a line for each file that is no valid key; None: raises ConfigError then.
        """
        found: dict[str, Holder] = {}
        for path in sorted(self.path.glob("*" + _SUFFIX)):
            try:
                values = _read(path)
                role: Any = values.get("role")
                name = str(values.get("name", path.stem))
                if role not in get_args(Role):
                    message = f"{path}: role must be one of {', '.join(get_args(Role))}"
                    raise ConfigError("keys", message)
                public = _key(values, "public", path)
            except FileNotFoundError:
                continue  # revoked since it was listed
            except ConfigError as error:
                if broken is None:
                    raise
                broken.append(str(error))
                continue
            found[public] = Holder(name, role, public, str(values.get("created", "")))
        return found

    def signature(self) -> Mapping[str, tuple[int, int, int]]:
        """Return a value that differs after any change of a key file in the folder."""
        found = {}
        for entry in os.scandir(self.path):
            if entry.name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found[entry.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return found

    def add(self, name: str, role: Role, output: Path, endpoint: str | None) -> Credentials:
        """Make and authorise a key, and write what its holder needs. May raise ConfigError."""
        path = self._of(name)
        try:
            with contextlib.suppress(FileExistsError):  # it is no folder, which `check` tells
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("keys", f"{self.path}: {error.strerror}") from error
        self.check()
        if path.exists():
            advice = f"choose another name, or first: stepscope keys revoke {name}"
            raise ConfigError("key_exists", f"there is a key {name!r} already; {advice}")
        credentials = Credentials(KeyPair.new(), self.server_pair().public, name, endpoint)
        write_credentials(output, credentials, role)
        created = time.strftime("%Y-%m-%d")
        holder = Holder(name, role, credentials.pair.public, created)
        # Write under another name first, because an engine may be reading the folder.
        unfinished = path.with_suffix(".new")
        try:
            unfinished.unlink(missing_ok=True)
            _write(unfinished, holder._asdict())
            unfinished.rename(path)
        except ConfigError:
            output.unlink(missing_ok=True)  # the key in it is not authorised
            raise
        return credentials

    def revoke(self, name: str) -> None:
        """Revoke a key. Raises ConfigError if there is no such key."""
        try:
            self._of(name).unlink()
        except FileNotFoundError:
            names = ", ".join(each.name for each in self.holders().values())
            what = f"no key {name!r} is in {self.path}; there are: {names or 'none'}"
            raise ConfigError("no_such_key", what) from None

    def _of(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            message = f"{name!r} cannot name a key: use letters, digits, '.', '_', '@', '-'"
            raise ConfigError("bad_key_name", message)
        return self.path / (name + _SUFFIX)


def _write(path: Path, values: Mapping[str, str], comment: str = "") -> None:
    """Write a file for its owner only, or none. Raises ConfigError if it exists or fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL
    try:
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(comment + "".join(f'{key} = "{text}"\n' for key, text in values.items()))
    except FileExistsError:
        what = f"{path} is there already; remove it or choose another name"
        raise ConfigError("key_exists", what) from None
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError("key_file", f"{path} cannot be written: {error.strerror}") from error


def _read(path: Path, *, is_secret: bool = False) -> dict[str, Any]:
    """Read a key file. Raises ConfigError: it is none, or secret and others can read it, too.

    Raises OSError: it is gone, or there are too many open files.
    """
    try:
        with path.open("rb") as stream:
            if is_secret:
                _check_private(path, os.fstat(stream.fileno()))
            return tomllib.loads(stream.read(65536).decode())
    except OSError as error:
        if not is_secret and (is_out_of_files(error) or isinstance(error, FileNotFoundError)):
            raise
        raise ConfigError("key_file", f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        # The error does not quote the line: it may hold the secret.
        raise ConfigError("key_file", f"{path} is no key file") from None


def _key(values: dict[str, Any], name: str, path: Path) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not _Z85.fullmatch(value):
        raise ConfigError("key_file", f"{path}: {name} is missing, or is no key")
    return value


def _check_private(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError if a file or folder is another user's, or open to others."""
    if status.st_uid != os.getuid():
        raise ConfigError("keys", f"{path} belongs to another user; copy it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode, right = stat.S_IMODE(status.st_mode), 700 if stat.S_ISDIR(status.st_mode) else 600
        message = f"{path} is open to others (mode {mode:04o}): chmod {right} {path}"
        raise ConfigError("keys", message)
