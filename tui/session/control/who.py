"""The operator's name in an engine's audit: a claim, unlike a key."""

import getpass
import os
import socket
import sys

from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import MAX_NAME, ClientSettings, environment_name


def who() -> str:
    """The account, its terminal and the machine, as anna/pts3@gpu-7; a name of one's own before it.

    The terminal distinguishes operators of one account.
    """
    try:
        account = getpass.getuser()
    except (KeyError, OSError):  # no name for this id, as in some containers
        account = str(os.getuid())
    terminal = _terminal()
    at = f"{account}{terminal and '/'}{terminal}@{socket.gethostname()}"
    try:
        name = _printable(resolve(ClientSettings, "client", {}).name)
    except WrongUsage:  # a config file that was broken while a dashboard is open: it goes on
        name = ""
    return f"{name} ({at})" if name else at


def call_me(name: str | None) -> None:
    """Use this name in this process and its children; None: the name in the settings.

    Raises:
        WrongUsage: it is none.
    """
    if name is None:
        return
    if not 1 <= len(_printable(name)) <= MAX_NAME:
        raise WrongUsage(f"--as: expected a name of 1 to {MAX_NAME} characters, got {name!r}")
    os.environ[environment_name("client", "name")] = name


def _printable(name: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in name).split())


def _terminal() -> str:
    """Such as pts3; empty where there is none."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            return os.ttyname(stream.fileno()).removeprefix("/dev/").replace("/", "")
        except (OSError, ValueError, AttributeError):  # a pipe; closed; none at all
            continue
    return ""
