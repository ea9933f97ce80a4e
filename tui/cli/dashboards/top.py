"""`stepscope top`: shows the dashboard of one engine, or of several side by side.

With `--web` it shows it in browsers; each that opens the page gets a process of its own. Nothing
from a browser reaches a command line: its process gets a size, keys and the mouse. textual-serve
runs a process for each connection, but lets the pages of any site connect: our web server says who
may open the page, and whose pages may connect.
"""

import base64
import hmac
import logging
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.http.settings import Address, parse_address
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.recordings.fleets.fleet import FLEET_STEPS, Fleet, shared_bytes
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.shared.connect import PAST_S, choose, connect, wait_for_any
from stepscope.tui.cli.shared.options import Past, Wait, argument, as_options, command, option
from stepscope.tui.cli.shared.output import note, say
from stepscope.tui.cli.shared.process import running
from stepscope.tui.session import live_source
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings, FleetSettings
from stepscope.tui.settings.terminal import can_be_drawn_on, piped_input

if TYPE_CHECKING:
    from aiohttp import web

_SERVERS_S = 1.0  # how long to wait for servers on this machine to answer
_WITH_WHOLE_PAST = 4  # engines; more of them load less past each: it must all be read
_COOKIE = "stepscope"  # not every browser sends its key with a WebSocket
_END_S = 0.5  # how long browsers may go on after Ctrl-C
_PAGE = Path(__file__).with_name("page.html")
_ASK = {"WWW-Authenticate": 'Basic realm="stepscope: any name, and the web key"'}
_Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
_KEY = "STEPSCOPE_WEB_KEY"  # browsers must know it
WEB = option(
    "[HOST:]PORT", "show it in browsers, not here; read-only without an operator's --key", "--web"
)


@command(
    "stepscope top",
    "stepscope top engine-0 engine-1 tcp://127.0.0.1:5555",
    "stepscope top http://127.0.0.1:8000",
    "stepscope top --web 8080",
    "tail -F server.log | stepscope top -",
    takes_key=True,
    sections=("dashboard",),
)
def top(
    endpoints: list[str] | None = argument(
        "ENDPOINT",
        "names of local engines, ipc://PATH, tcp://HOST:PORT, http://HOST:PORT with /metrics, a "
        "JSON list of servers, - for a log from a pipe; several are shown side by side "
        "(default: [fleet] engines of the config file, else those of this machine)",
    ),
    *,
    past: Past = PAST_S,
    wait: Wait = True,
    web: str | None = WEB,
    flags: dict[str, Any],
) -> None:
    """Watch and steer running engines."""
    if endpoints == ["-"]:
        if web is not None:
            raise WrongUsage("--web: not of a log on standard input")
        _show_log(resolve(DashboardSettings, "dashboard", flags))
        return
    named = named_engines(endpoints or ())
    settings = resolve(DashboardSettings, "dashboard", flags)
    browsers = browsers_of(web, readonly=settings.readonly)
    waits = wait and (can_be_drawn_on() or browsers is not None)
    chosen = wait_for_any(lambda: engines_to_show(named), waits)
    if browsers is not None:
        browsers.serve(endpoints or (), {**flags, "past": past})
        return
    need_terminal("'stepscope record' and 'stepscope snapshot' work without one")
    if len(chosen) == 1 and isinstance(chosen[0], Endpoint):
        connect(chosen[0]).close()  # of several, the row of each says that it is starting
    past *= min(1.0, _WITH_WHOLE_PAST / len(chosen))
    known, find = set(chosen), partial(_addresses, named) if named else find_local

    def received(
        found: Sequence[live_source.Address], *limits: int
    ) -> list[live_source.LiveSource]:
        histories = (new_history(settings, *limits) for _ in found)
        return [live_source.receive(*each, past) for each in zip(found, histories, strict=True)]

    def newcomers() -> list[live_source.LiveSource]:
        try:
            found = [each for each in find() if each not in known]
        except (ConfigError, OSError):  # such as: the folder of the sockets is no longer ours
            return []
        known.update(found)
        return received(found, FLEET_STEPS)

    limits = (FLEET_STEPS, shared_bytes(len(chosen))) if len(chosen) > 1 else ()
    _show(received(chosen, *limits), newcomers, settings)


def _show_log(settings: DashboardSettings) -> None:
    from stepscope.recordings.importing.log_source import LogPipe

    pipe = LogPipe(piped_input(), partial(new_history, settings, FLEET_STEPS))
    need_terminal("'stepscope stats' and 'screenshot' read a log without one")
    note("waiting for a line with figures; Ctrl-C ends")
    _show(pipe.begin(), pipe.newcomers, settings)


def _show(
    sources: Sequence[live_source.LiveSource],
    newcomers: Callable[[], Sequence[live_source.LiveSource]],
    settings: DashboardSettings,
) -> None:
    fleet = Fleet(sources, newcomers=newcomers)
    with running(fleet):
        run_live(sources[0], settings, fleet=fleet)


def named_engines(named: Sequence[str]) -> list[str]:
    """Return the engines that are named, else those of the environment or the config file."""
    return list(named) or list(resolve(FleetSettings, "fleet", {}).engines)


def engines_to_show(named: Sequence[str]) -> list[live_source.Address]:
    """Return the addresses of the named engines; without names, of all engines on this machine."""
    if names := named_engines(named):
        return _addresses(names)
    from stepscope.engine.adapters.metrics.local_servers import LocalServers  # imports a parser

    servers = LocalServers()
    try:
        found = live_source.local_addresses(servers.wait(_SERVERS_S))
    finally:
        servers.stop()
    is_fleet = len(found) > 1 or any(isinstance(each, MetricsAddress) for each in found)
    return found if is_fleet else [choose(None, "stepscope top {}")]


def _addresses(names: Sequence[str]) -> list[live_source.Address]:
    return list(dict.fromkeys(each for name in names for each in live_source.addresses(name)))


# In browsers


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
        stepscope = (sys.executable, "-m", "stepscope.tui.cli", "top")
        command = shlex.join([*stepscope, *as_options(options), "--", *engines])
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
