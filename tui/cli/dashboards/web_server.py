"""The web server of `--web`: who may open the page, and whose pages may connect.

textual-serve runs a process for each connection, but lets the pages of any site connect.
"""

import base64
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from stepscope.engine.http.settings import Address

_COOKIE = "stepscope"  # not every browser sends its key with a WebSocket
_END_S = 0.5  # how long browsers may go on after Ctrl-C
_PAGE = Path(__file__).with_name("page.html")
_ASK = {"WWW-Authenticate": 'Basic realm="stepscope: any name, and the web key"'}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def web_app(command: str, key: str) -> web.Application:
    """Return the application.

    Args:
        command: what runs for each browser, for a shell.
        key: what browsers must know; empty: only those on this machine may come.
    """
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
        cookie = request.cookies.get(_COOKIE, "").encode()
        password = _password(request.headers.get("Authorization", ""))
        if key and not (_is_same(cookie, known) or _is_same(password, key)):
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


def _is_same(given: bytes, secret: str) -> bool:
    return hmac.compare_digest(given, secret.encode())


def _password(authorization: str) -> bytes:
    try:
        return base64.b64decode(authorization.removeprefix("Basic ")).partition(b":")[2]
    except ValueError:
        return b""


def serve(listener: socket.socket, command: str, key: str) -> None:
    """Serve browsers until SIGINT or SIGTERM; what runs for them ends then, too."""
    logging.getLogger("textual-serve").setLevel(logging.CRITICAL)  # a browser that goes is no error
    os.environ["TERM"] = "xterm-256color"
    app = web_app(command, key)
    web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=_END_S)
