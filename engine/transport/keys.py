"""Keys of people: how they are made and where they are stored. A key is a pair for libzmq's CURVE.

Secret halves are only in memory, and in files that only their owner can read. No `repr` shows a
secret, and no command takes one as an argument, because a list of processes would show it.
"""

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import zmq

from stepscope.engine.protocol.settings.knobs import ConfigError

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
