"""The web server of `--web`: who may open the page, and which sites may use its connection.

textual-serve runs a process for each connection. Its own page loads a font from elsewhere, and its
server lets any page that somebody opens connect to it: both are ours.
"""

import base64
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from stepscope.engine.http.settings import Address

_MOST_SESSIONS = 16  # each is a process of some 100 MB
_COOKIE = "stepscope"
_END_S = 5.0  # for the processes to end
_PAGE = """<!DOCTYPE html>
<title>stepscope</title>
<link rel="stylesheet" href="static/css/xterm.css">
<style>
@font-face { font-family: "Roboto Mono";
             src: url("static/fonts/RobotoMono-VariableFont_wght.ttf"); }
html, body, #terminal { margin: 0; height: 100%; background: #111; color: #ccc; overflow: hidden }
p { font: 16px monospace; position: absolute; margin: 1em; z-index: 1 }
.-first-byte #opening, body:not(.-closed) #closed { display: none }
</style>
<body>
<p id="opening">opening the dashboard; an engine that does not answer is waited for …</p>
<p id="closed">the dashboard has ended; reload the page to open it again</p>
<div id="terminal" class="textual-terminal" data-font-size="16"></div>
<script>
document.querySelector("#terminal").dataset.sessionWebsocketUrl =
  location.origin.replace(/^http/, "ws") + "/ws";
</script>
<script src="static/js/textual.js"></script>
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' ws: wss:; frame-ancestors 'none'"
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer:
    """Checks who asks, and hands connections to textual-serve.

    Args:
        command: what runs for each browser, for a shell.
        key: what browsers must know; empty: only those on this machine may come.
    """

    def __init__(self, command: str, key: str) -> None:
        self._key = key.encode()
        self._cookie = secrets.token_hex()  # not every browser sends a key with a WebSocket
        self._sessions = Server(command)
        self._num_sessions = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/ws", self._session)
        app.router.add_static("/static", self._sessions.statics_path)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text=f"not for pages of {origin}")
        if not self._key:
            # A stranger's name may be made to lead here, and so pass for the same origin.
            host = urlsplit(f"//{request.host}").hostname or ""
            if not Address(host, 0).is_loopback:
                raise web.HTTPForbidden(text=f"{host} is no name of this machine's loopback")
            return await handler(request)
        cookie = request.cookies.get(_COOKIE, "")
        is_known = hmac.compare_digest(cookie.encode(), self._cookie.encode())
        if not is_known and not self._has_key(request.headers.get("Authorization", "")):
            ask = {"WWW-Authenticate": 'Basic realm="stepscope: any name, and the web key"'}
            raise web.HTTPUnauthorized(text="this dashboard asks for its key", headers=ask)
        response = await handler(request)
        if not response.prepared:
            response.set_cookie(_COOKIE, self._cookie, httponly=True, samesite="Strict")
        return response

    def _has_key(self, authorization: str) -> bool:
        try:
            given = base64.b64decode(authorization.removeprefix("Basic "))
        except ValueError:
            return False
        return hmac.compare_digest(given.partition(b":")[2], self._key)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=_PAGE, content_type="text/html", headers=_HEADERS)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        if self._num_sessions >= _MOST_SESSIONS:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_SESSIONS} browsers are connected")
        self._num_sessions += 1
        try:
            return await self._sessions.handle_websocket(request)
        finally:
            self._num_sessions -= 1


def serve(listener: socket.socket, command: str, key: str) -> None:
    """Serve browsers until SIGINT or SIGTERM; what runs for them ends then, too."""
    logging.getLogger("textual-serve").setLevel(logging.CRITICAL)  # a browser that goes is no error
    os.environ["TERM"] = "xterm-256color"
    app = WebServer(command, key).app()
    web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=_END_S)
