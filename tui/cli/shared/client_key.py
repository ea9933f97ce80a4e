"""The key with which commands connect to an engine."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.engine.transport.keys import check_public, read_credentials
from stepscope.engine.transport.local_engines import local_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE, SERVER_KEY_VARIABLE
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import ClientSettings


def use_key(flags: Mapping[str, Any]) -> None:
    """Make all connections of this process and its children use the key that the user chose."""
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
    """Say which of the engines named (none: of this machine) ask for no key."""
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
