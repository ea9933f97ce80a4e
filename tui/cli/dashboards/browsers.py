"""`--web`: shows a dashboard in browsers; each that opens the page gets a process of its own.

Nothing from a browser reaches a command line: its process gets a size, keys and the mouse.
"""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engine.http.settings import Address, parse_address
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.tui.cli.shared.options import as_options, option
from stepscope.tui.cli.shared.output import say
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage

_KEY = "STEPSCOPE_WEB_KEY"  # browsers must know it
WEB = option(
    "[HOST:]PORT", "show it in browsers, not here; read-only without an operator's --key", "--web"
)


class Browsers(NamedTuple):
    """Where browsers are served, and whether they may change the engine."""

    address: Address
    steers: bool

    def serve(self, engines: Sequence[str], flags: Mapping[str, Any]) -> None:
        """Show `stepscope top ENGINES`, with these options by field name, until Ctrl-C."""
        from stepscope.tui.cli.dashboards.web_server import serve  # loads textual-serve

        host, port = self.address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            why = error.strerror or error
            raise CommandFailed(f"cannot listen on {self.address.text}: {why}") from error
        # A browser has all characters. What it prefers is not what the owner of this command does.
        options = {"ascii": False, **flags, "keep": False, "readonly": not self.steers}
        stepscope = (sys.executable, "-m", "stepscope.tui.cli", "top")
        command = shlex.join([*stepscope, *as_options(options), "--", *engines])
        bound = self.address._replace(port=listener.getsockname()[1])
        may = "browsers may steer" if self.steers else "read-only"
        say(f"dashboard on http://{bound.text} ({may}; Ctrl-C ends it)")
        serve(listener, f"exec {command}", os.environ.pop(_KEY, ""))


def browsers_of(web: str | None, *, readonly: bool = True) -> Browsers | None:
    """Return what `--web` asks for; None without it.

    Only where the owner gave an operator's key, browsers may steer, unless `readonly`.

    Raises:
        CommandFailed: textual-serve is not installed.
        WrongUsage: strangers could watch, or other users of this machine could steer the engine.
    """
    if web is None:
        return None
    if find_spec("textual_serve") is None:
        raise CommandFailed("--web needs textual-serve: pip install 'stepscope[web]'")
    address, key = parse_address(web), os.environ.get(KEY_VARIABLE)
    steers = not readonly and key is not None and read_credentials(Path(key)).role == "operator"
    if not os.environ.get(_KEY) and (steers or not address.is_loopback):
        who = "other users of this machine could steer the engine"
        if not address.is_loopback:
            who = f"{address.text} can be reached from other machines"
        raise WrongUsage(f"--web: {who}: set {_KEY} to a secret, for which browsers then ask")
    return Browsers(address, steers)
