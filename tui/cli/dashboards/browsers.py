"""`--web`: shows a dashboard in browsers; each that opens the page gets a process of its own.

Only the size of the browser's window, and its keys and mouse, reach that process. Nobody but the
owner of this command says what it runs.
"""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.engine.http.settings import Address, parse_address
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.tui.cli.shared.options import as_options
from stepscope.tui.cli.shared.output import say
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage

_KEY = "STEPSCOPE_WEB_KEY"  # browsers must know it

Web = Annotated[
    str | None,
    typer.Option(
        "--web",
        metavar="[HOST:]PORT",
        help="show it in browsers, not here; read-only unless --key names an operator's key",
        show_default=False,
    ),
]


def may_steer(is_readonly: bool) -> bool:
    """Whether browsers may change the engine: if the owner gave an operator's key for it."""
    path = os.environ.get(KEY_VARIABLE)
    return not is_readonly and path is not None and read_credentials(Path(path)).role == "operator"


def web_address(text: str, *, steers: bool = False) -> Address:
    """Return where to serve browsers.

    Raises:
        CommandFailed: textual-serve is not installed.
        ConfigError: no address.
        WrongUsage: strangers could watch, or other users of this machine could steer the engine.
    """
    if find_spec("textual_serve") is None:
        raise CommandFailed(
            "textual-serve is not installed, and --web needs it: pip install 'stepscope[web]'"
        )
    address = parse_address(text)
    if not os.environ.get(_KEY) and (steers or not address.is_loopback):
        who = "everybody on this machine could steer the engine"
        if not address.is_loopback:
            who = f"{address.text} can be reached from other machines"
        raise WrongUsage(f"--web: {who}: set {_KEY} to a secret, for which browsers then ask")
    return address


def serve_browsers(
    address: Address, engines: Sequence[str], flags: Mapping[str, Any], *, steers: bool = False
) -> None:
    """Show the dashboard of `engines` to everybody who opens the page, until Ctrl-C.

    Args:
        flags: options of `stepscope top`, by field name.
        steers: whether browsers may change the engines.
    """
    from stepscope.tui.cli.dashboards.web_server import serve  # loads textual-serve

    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise CommandFailed(f"--web: cannot listen on {address.text}: {why}") from error
    # A browser has every character, and its choices are not those of the owner's next session.
    options = {"ascii": False, **flags, "keep": False, "readonly": not steers}
    argv = [sys.executable, "-m", "stepscope.tui.cli", "top", *as_options(options), "--", *engines]
    host, port = listener.getsockname()[:2]
    what = "browsers may steer" if steers else "read-only"
    say(f"dashboard on http://{Address(host, port).text} ({what}; Ctrl-C ends it)")
    serve(listener, f"exec {shlex.join(argv)}", os.environ.pop(_KEY, ""))
