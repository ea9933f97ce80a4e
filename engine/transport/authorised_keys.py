"""`KeyFolder`: the folder with an engine's own key pair and the keys of clients that it lets in.

`server.key` is the engine's own key pair. Each `NAME.pub` holds the public half of one client's key
and its role. Deleting the file revokes the key, without a restart. The folder has mode 0700.
"""

import os
import stat
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import platformdirs

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.keys import (
    Credentials,
    KeyPair,
    check_key_name,
    key_of,
    read_private,
    write_credentials,
    write_private,
)
from stepscope.engine.transport.open_files import is_out_of_files

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
