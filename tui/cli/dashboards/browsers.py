"""`--web`: shows a dashboard in browsers; each that opens the page gets a process of its own.

Nothing from a browser reaches a command line: its process gets a size, keys and the mouse.
textual-serve runs a process for each connection, but lets the pages of any site connect: our web
server says who may open the page, and whose pages may connect.
"""

import base64
import hmac
import logging
import os
import secrets
import shlex
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from stepscope.engine.http.settings import Address, parse_address
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.tui.cli.shared.options import as_options, option
from stepscope.tui.cli.shared.output import say
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.terminal import OURSELVES

if TYPE_CHECKING:
    from aiohttp import web

_COOKIE = "stepscope"  # not every browser sends its key with a WebSocket
_END_S = 0.5  # how long browsers may go on after Ctrl-C
_PAGE = Path(__file__).with_name("page.html")
_ASK = {"WWW-Authenticate": 'Basic realm="stepscope: any name, and the web key"'}
_Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
_KEY = "STEPSCOPE_WEB_KEY"  # browsers must know it
WEB = option(
    "[HOST:]PORT", "show it in browsers, not here; read-only without an operator's --key", "--web"
)


def web_app(command: str, key: str) -> "web.Application":
    """Return the application. Browsers must know the `key`; without one, be on this machine."""
    from aiohttp import web
    from textual_serve.server import Server

    known = secrets.token_hex()

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text=f"not for pages of {origin}")
        # A stranger's name may be made to lead here, and so pass for the same origin.
        host = urlsplit(f"//{request.host}").hostname or ""
        if not key and not Address(host, 0).is_loopback:
            raise web.HTTPForbidden(text=f"{host} is no name of this machine's loopback")
        cookie = request.cookies.get(_COOKIE, "")
        password = _password(request.headers.get("Authorization", ""))
        pairs = ((cookie.encode(), known.encode()), (password, key.encode()))
        if key and not any(hmac.compare_digest(*pair) for pair in pairs):
            raise web.HTTPUnauthorized(text="this dashboard asks for its key", headers=_ASK)
        response = await handler(request)
        if not response.prepared:
            response.headers["X-Frame-Options"] = "DENY"
            if key:
                response.set_cookie(_COOKIE, known, httponly=True, samesite="Strict")
        return response

    async def page(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(_PAGE)

    server = Server(command)
    app = web.Application(middlewares=[guarded])
    app.router.add_get("/", page)
    app.router.add_get("/ws", server.handle_websocket)
    app.router.add_static("/static", server.statics_path)
    return app


def _password(authorization: str) -> bytes:
    try:
        return base64.b64decode(authorization.removeprefix("Basic ")).partition(b":")[2]
    except ValueError:
        return b""


class Browsers(NamedTuple):
    """Where browsers are served, and whether they may change the engine."""

    address: Address
    steers: bool

    def serve(self, engines: Sequence[str], flags: Mapping[str, Any]) -> None:
        """Show `stepscope top ENGINES`, with these options by field name, until Ctrl-C."""
        from aiohttp.web import run_app

        host, port = self.address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            why = error.strerror or error
            raise CommandFailed(f"cannot listen on {self.address.text}: {why}") from error
        # A browser has all characters. What it prefers is not what the owner of this command does.
        options = {"ascii": False, **flags, "keep": False, "readonly": not self.steers}
        command = shlex.join([*OURSELVES, "top", *as_options(options), "--", *engines])
        bound = self.address._replace(port=listener.getsockname()[1])
        may = "browsers may steer" if self.steers else "read-only"
        say(f"dashboard on http://{bound.text} ({may}; Ctrl-C ends it)")
        logging.getLogger("textual-serve").setLevel(logging.CRITICAL)  # a browser may go
        os.environ["TERM"] = "xterm-256color"
        app = web_app(f"exec {command}", os.environ.pop(_KEY, ""))
        run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=_END_S)


def browsers_of(web: str | None, *, readonly: bool = True) -> Browsers | None:
    """Return what `--web` asks for; None without it. With an operator's key, browsers may steer.

    Raises WrongUsage: strangers could watch, or other users of this machine could steer the engine.
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
