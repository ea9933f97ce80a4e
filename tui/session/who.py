"""The operator's name in an engine's audit trail. Unlike a key, the name proves nothing."""

import getpass
import os
import socket
import sys

from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import ClientSettings


def who() -> str:
    """Return account, terminal and machine (anna/pts3@gpu-7), after the settings' name."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):  # this user id has no name, as in some containers
        account = str(os.getuid())
    terminal = _terminal()
    at = f"{account}{terminal and '/'}{terminal}@{socket.gethostname()}"
    try:
        name = resolve(ClientSettings, "client", {}).name
        name = " ".join("".join(each if each.isprintable() else " " for each in name).split())
    except WrongUsage:  # the config file became invalid while a dashboard is open: do without
        name = ""
    return f"{name} ({at})" if name else at


def _terminal() -> str:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            return os.ttyname(stream.fileno()).removeprefix("/dev/").replace("/", "")
        except (OSError, ValueError, AttributeError):  # a pipe, a closed stream, or no stream
            continue
    return ""
