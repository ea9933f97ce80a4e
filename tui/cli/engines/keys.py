"""`stepscope keys`, and the key with which other commands connect to an engine."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.protocol.asker import LOCAL
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.authorised_keys import ROLES, KeyFolder
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.engine.transport.keys import check_public, read_credentials
from stepscope.engine.transport.local_engines import local_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE, SERVER_KEY_VARIABLE
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import ClientSettings


def new(
    name: str, role: str, output: Path | None, endpoint: str | None, folder: Path | None
) -> None:
    """Create a key, authorise it for all engines that use the folder of keys, and write its file.

    Raises:
        WrongUsage: an option is not valid.
        ConfigError: the name has a key already, or a file cannot be written.
    """
    chosen = next((each for each in ROLES if each == role), None)
    if chosen is None:
        raise WrongUsage(f"--role: expected one of {', '.join(ROLES)}, got {role!r}")
    if name == LOCAL:
        raise WrongUsage(
            f"{LOCAL!r} is the audit's name for the engine's own account; choose another"
        )
    where = None
    if endpoint is not None:
        where = Endpoint.parse(endpoint).control
        if not where.startswith("tcp://"):
            raise WrongUsage(f"--endpoint: expected tcp://HOST:PORT, got {endpoint}")
    output = output or Path(f"{name}.key")
    keys = KeyFolder(folder)
    credentials = keys.add(name, chosen, output, where)
    say(
        f"{name} ({role}) is authorised in {keys.path}; running engines accept the key at once.",
        f"{output} is all that {name} needs, and a secret: it goes to their machine as",
        f"  ~/.config/stepscope/keys/{name}.key   (mode 0600)",
        f"There: stepscope top {where or 'tcp://HOST:PORT'}",
        f"The engine's public key, which the file pins: {credentials.server}",
    )
    if endpoint is not None and Endpoint.parse(endpoint).is_private:
        say(
            "Only this machine can reach that endpoint: an engine asks for keys there only with",
            f"  stepscope serve --endpoint {where} --keys {shlex.quote(str(keys.path))}",
        )


def list_keys(folder: Path | None, as_json: bool) -> None:
    """Print the authorised keys.

    Raises:
        ConfigError: the folder of the keys cannot be used.
    """
    keys = KeyFolder(folder)
    if folder is not None or keys.path.exists():
        keys.check()
    holders = list(keys.holders().values()) if keys.path.exists() else []
    if as_json:
        document = [holder._asdict() for holder in holders]
        say(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    if not holders:
        say(f"no key is authorised in {keys.path}")
        return
    width = max(len(holder.name) for holder in holders)
    say(
        *(
            f"{holder.name:<{width}}  {holder.role:<8}  {holder.created:<10}  {holder.public}"
            for holder in holders
        )
    )


def revoke(name: str, folder: Path | None) -> None:
    """Remove a key from the authorised ones.

    Raises:
        ConfigError: there is no such key.
    """
    keys = KeyFolder(folder)
    keys.revoke(name)
    say(
        f"{name} has no access any more; running engines cut off its connections",
        "(engines on 127.0.0.1 or ipc:// ask for keys only with 'stepscope serve --keys DIR')",
    )


def use_key(flags: Mapping[str, Any]) -> None:
    """Make all connections of this process and its children use the key that the user chose.

    Raises:
        WrongUsage: a server key is given without a key.
        ConfigError: the key file cannot be used.
    """
    settings = resolve(ClientSettings, "client", flags)
    if not settings.key:
        if settings.server_key:
            raise WrongUsage("--server-key: only with --key FILE")
        return
    path = Path(settings.key).expanduser().absolute()
    read_credentials(path)
    os.environ[KEY_VARIABLE] = str(path)
    if settings.server_key:
        os.environ[SERVER_KEY_VARIABLE] = check_public(settings.server_key, "--server-key")


def note_unused_key(endpoints: Iterable[str]) -> None:
    """Print a note on stderr for each engine that asks for no key although --key is given.

    Args:
        endpoints: as the user named them; empty: the engines of this machine.
    """
    try:
        named = [Endpoint.parse(each) for each in endpoints] or find_local()
        keyless = [each for each in named if local_credentials(each) == (True, None)]
    except (ConfigError, OSError):
        return  # the command itself says what is wrong
    for each in keyless:
        print(
            f"stepscope: note: the engine at {each.control} asks for no key; --key is not used",
            file=sys.stderr,
        )
