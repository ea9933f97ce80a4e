"""Keys: how they are made and stored, and which an engine lets in. Each is a pair for CURVE.

Secret halves are only in memory, and in files that only their owner can read. No `repr` shows a
secret, and no command takes one as an argument, because a list of processes would show it.
"""

import os
import re
import stat
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import platformdirs
import zmq

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.rate_limit import is_out_of_files

NUM_KEY_CHARS = 40  # 32 bytes in Z85 (rfc.zeromq.org/spec/32)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_CLIENT_SUFFIX = ".key"


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


def client_folder() -> Path:
    """Return the folder where a client looks for keys, one `NAME.key` each. It need not exist."""
    return platformdirs.user_config_path("stepscope") / "keys"


def check_key_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be the name of a key."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "bad_key_name", f"{name!r} cannot name a key: use letters, digits, '.', '_', '@', '-'"
        )


def check_public(text: str, what: str) -> str:
    """Return `text`, if it is the public half of a key; else raise ConfigError."""
    if not _Z85.fullmatch(text):
        raise ConfigError(
            "bad_key", f"{what}: expected a public key of {NUM_KEY_CHARS} characters (Z85)"
        )
    return text


def write_private(path: Path, text: str, *, replace: bool = False) -> None:
    """Write a file for its owner only, or none. Raises ConfigError if it exists or fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:
                os.fchmod(descriptor, 0o600)
                stream.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise ConfigError(
            "key_exists", f"{path} is there already; remove it or choose another name"
        ) from None
    except OSError as error:
        raise ConfigError("key_file", f"{path} cannot be written: {error.strerror}") from error


def read_private(path: Path) -> dict[str, object]:
    """Read the values in a private key file. Raises ConfigError if others can read it, too."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_uid != os.getuid():
                raise ConfigError("key_owner", f"{path} belongs to another user; copy it")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    "key_mode",
                    f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"chmod 600 {path}",
                )
            return tomllib.loads(stream.read(65536).decode())
    except OSError as error:
        raise ConfigError("key_file", f"{path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        # The error does not quote the line: it may hold the secret.
        raise ConfigError("key_file", f"{path} is no key file") from None


def key_of(values: dict[str, object], name: str, path: Path) -> str:
    """Return one of the keys in a file. Raises ConfigError if it is missing or malformed."""
    value = values.get(name)
    if not isinstance(value, str) or not _Z85.fullmatch(value):
        raise ConfigError("key_file", f"{path}: {name} is missing, or is no key")
    return value


def write_credentials(path: Path, credentials: Credentials, role: str) -> None:
    """Write the only file that a client needs; `read_credentials` reads it."""
    lines = [
        f"# stepscope: the holder of this file is {credentials.name!r} ({role}) to the engine.",
        "# Its place: ~/.config/stepscope/keys/ (mode 0600), or --key FILE.",
        f'name = "{credentials.name}"',
        f'role = "{role}"',
        f'public = "{credentials.pair.public}"',
        f'secret = "{credentials.pair.secret}"',
        f'server = "{credentials.server}"',
    ]
    if credentials.endpoint is not None:
        lines.append(f'endpoint = "{credentials.endpoint}"')
    write_private(path, "\n".join(lines) + "\n")


def read_credentials(path: Path) -> Credentials:
    """Read a file that `write_credentials` wrote.

    Raises ConfigError: the file cannot be read, is no key file, lacks a value, or other users can
    read it, too.
    """
    values = read_private(path)
    pair = KeyPair(key_of(values, "public", path), key_of(values, "secret", path))
    endpoint = values.get("endpoint")
    return Credentials(
        pair=pair,
        server=key_of(values, "server", path),
        name=str(values.get("name", path.stem)),
        endpoint=endpoint if isinstance(endpoint, str) else None,
        role=str(values.get("role", "")),
        path=path,
    )


def find_credentials(endpoint: str, *, is_remote: bool) -> Credentials | None:
    """Find the key in `client_folder()` for an endpoint; None if there is none.

    A key that names the endpoint comes first. A key that names no endpoint is used for an engine on
    another machine, if it is the only such key.

    Raises ConfigError: several keys could be meant, or a file cannot be used.
    """
    anywhere: list[Credentials] = []
    for path in sorted(client_folder().glob("*" + _CLIENT_SUFFIX)):
        credentials = read_credentials(path)
        if credentials.endpoint == endpoint:
            return credentials
        if credentials.endpoint is None:
            anywhere.append(credentials)
    if not is_remote or not anywhere:
        return None
    if len(anywhere) > 1:
        names = ", ".join(str(each.path) for each in anywhere)
        raise ConfigError(
            "which_key", f"several keys could be meant for {endpoint}: {names}; add --key FILE"
        )
    return anywhere[0]


Role: TypeAlias = Literal["viewer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
_SERVER = "server.key"
_SUFFIX = ".pub"


class Holder(NamedTuple):
    """The holder of a key: name and role. A viewer may only read; an operator may do everything."""

    name: str
    role: Role
    public: str
    created: str = ""  # day, as YYYY-MM-DD


def default_folder() -> Path:
    return platformdirs.user_config_path("stepscope") / "authorised-keys"


class KeyFolder:
    """The folder with an engine's own key pair (`server.key`) and the keys of clients it lets in.

    Each `NAME.pub` holds the public half of one client's key and its role. Deleting the file
    revokes the key, without a restart. The folder has mode 0700.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_folder() if path is None else path

    def make(self) -> None:
        """Make the folder if it does not exist. Raises ConfigError if that fails."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError("keys", f"{self.path} is no folder") from error
        except OSError as error:
            raise ConfigError("keys", f"{self.path}: {error.strerror}") from error

    def check(self) -> None:
        """Raise ConfigError if the folder is missing, or other users could put keys into it."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise ConfigError(
                "keys",
                f"{self.path}: {error.strerror}; 'stepscope keys new NAME --role operator --keys "
                f"{self.path}' makes it with a first key",
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError("keys", f"{self.path} is no folder")
        if status.st_uid != os.getuid():
            raise ConfigError("keys", f"{self.path} belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                "keys",
                f"{self.path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): "
                f"chmod 700 {self.path}",
            )

    def server_pair(self) -> KeyPair:
        """Return the engine's own key pair; the first call makes it."""
        path = self.path / _SERVER
        if not path.exists():
            pair = KeyPair.new()
            write_private(
                path,
                "# stepscope: the engine's own key. Clients know its public half.\n"
                f'public = "{pair.public}"\nsecret = "{pair.secret}"\n',
            )
            return pair
        values = read_private(path)
        return KeyPair(key_of(values, "public", path), key_of(values, "secret", path))

    def holders(self, broken: list[str] | None = None) -> dict[str, Holder]:
        """Return the holders of all authorised keys, by public key, in the order of their names.

        `broken`: gets a line for each file that is no valid key; None: such a file is an error.

        Raises ConfigError: a file is no valid key, and `broken` is None.
        """
        found: dict[str, Holder] = {}
        for path in sorted(self.path.glob("*" + _SUFFIX)):
            try:
                holder = _read(path)
            except FileNotFoundError:
                continue  # revoked since it was listed
            except ConfigError as error:
                if broken is None:
                    raise
                broken.append(str(error))
                continue
            found[holder.public] = holder
        return found

    def signature(self) -> Mapping[str, tuple[int, int, int]]:
        """Return a value that differs after any change of a key file in the folder."""
        found = {}
        for entry in os.scandir(self.path):
            if entry.name.endswith(_SUFFIX):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                found[entry.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return found

    def add(self, name: str, role: Role, output: Path, endpoint: str | None) -> Credentials:
        """Make and authorise a key, and write what its holder needs. May raise ConfigError."""
        check_key_name(name)
        self.make()
        self.check()
        path = self._of(name)
        if path.exists():
            raise ConfigError(
                "key_exists",
                f"there is a key {name!r} already; choose another name, or first: "
                f"stepscope keys revoke {name}",
            )
        credentials = Credentials(KeyPair.new(), self.server_pair().public, name, endpoint)
        write_credentials(output, credentials, role)
        try:
            self.authorise(Holder(name, role, credentials.pair.public, time.strftime("%Y-%m-%d")))
        except ConfigError:
            output.unlink(missing_ok=True)  # the key in it is not authorised
            raise
        return credentials

    def authorise(self, holder: Holder) -> None:
        text = (
            f'name = "{holder.name}"\nrole = "{holder.role}"\npublic = "{holder.public}"\n'
            f'created = "{holder.created}"\n'
        )
        path = self._of(holder.name)
        # Write under another name first, because an engine may be reading the folder.
        unfinished = path.with_suffix(".new")
        write_private(unfinished, text, replace=True)
        unfinished.rename(path)

    def revoke(self, name: str) -> None:
        """Revoke a key. Raises ConfigError if there is no such key."""
        check_key_name(name)
        try:
            self._of(name).unlink()
        except FileNotFoundError:
            names = ", ".join(each.name for each in self.holders().values())
            raise ConfigError(
                "no_such_key", f"no key {name!r} is in {self.path}; there are: {names or 'none'}"
            ) from None

    def _of(self, name: str) -> Path:
        return self.path / (name + _SUFFIX)


def _read(path: Path) -> Holder:
    try:
        values = tomllib.loads(path.read_bytes()[:65536].decode())
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_out_of_files(error):
            raise
        raise ConfigError("keys", f"{path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError("keys", f"{path} is not a key that 'stepscope keys' made") from None
    role = values.get("role")
    if role not in ROLES:
        raise ConfigError("keys", f"{path}: role must be one of {', '.join(ROLES)}")
    name = str(values.get("name", path.stem))
    return Holder(name, role, key_of(values, "public", path), str(values.get("created", "")))
