"""`Connection`: one client's connection to the HTTP port; `Guard`: what each request must pass.

Without the limits of `Connection`, uvicorn's own protocol accepts a head of any size, and waits for
it as long as it takes, before the API key is checked.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import uuid
from typing import Any
from urllib.parse import urlsplit

import httptools
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stepscope.engine.http.errors import ApiError, internal_error
from stepscope.engine.http.metrics.exposition import Exposition

MAX_HEAD_BYTES = 32 * 1024  # that may come without a whole head or a piece of a body
MAX_HEAD_LINES = 128
MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one
HEAD_S = 10.0  # for a whole head, and for the rest of a body whose request is already answered
IDLE_S = 75.0  # between an answer and the next request
_SLICE = 16 * 1024  # bytes passed to the parser at once: the limit is checked after each


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits: what goes beyond one ends the connection.

    `most`: connections that the server may have.
    """

    def __init__(self, most: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = most
        self._num_bytes = 0  # since the last whole head or piece of a body
        self._is_head = False  # a head is being received
        self._is_due = True  # a request is to come, or is being received
        self._timer: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_due = True
        for begin in range(0, len(data), _SLICE):
            if self.transport.is_closing():
                return
            part = data[begin : begin + _SLICE]
            self._num_bytes += len(part)
            try:
                # A request for an upgrade is answered without it.
                with contextlib.suppress(httptools.HttpParserUpgrade):
                    self.parser.feed_data(part)
                if self._num_bytes > MAX_HEAD_BYTES:
                    raise httptools.HttpParserError
            except httptools.HttpParserError:
                self.send_400_response("this is no valid HTTP request, or its head is too large")
        self._watch()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._is_head = self._is_due = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head:
            return  # a trailer
        if len(self.headers) == MAX_HEAD_LINES:
            raise httptools.HttpParserError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError
        self._is_head, self._num_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_due, self._num_bytes = False, 0
        super().on_message_complete()

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    # Time

    def _watch(self) -> None:
        """Start the timer if something must come from the client now; stop it if nothing must."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or not self._is_due:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


log = logging.getLogger("stepscope.http")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Health and metrics need no key, as in vLLM, because probes and Prometheus send none.
_GUARDED = ("/v1/", "/reset_prefix_cache")


class Guard:
    """An ASGI application that wraps another one, and gives every request an id.

    Checks its key, host and origin. No exception of a request gets past it.
    """

    def __init__(self, app: ASGIApp, api_key: str, exposition: Exposition) -> None:
        self._app = app
        self._key = api_key.encode()
        self._exposition = exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope["stepscope.request_id"] = request_id
        scope["app"] = self  # the router then raises HTTPException where there is no route
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (b"x-request-id", request_id.encode())
                message["headers"] = [*message["headers"], named]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await error.response(scope, receive, send_named)
        except HTTPException as error:
            await _no_route(error, scope).response(scope, receive, send_named)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await internal_error().response(scope, receive, send_named)
        finally:
            self._exposition.count_request(scope["path"], status)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a wrong key, and for what a web page of another site might send."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._key and scope["path"].startswith(_GUARDED):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(key.encode("latin-1"), self._key)
            if not is_key or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "no valid API key was sent: set it in the client (Authorization: Bearer KEY)",
                    code="invalid_api_key",
                )
        # A page may let its own host name resolve to the loopback address (DNS rebinding), where a
        # server without a key listens. The page's requests then look like same-site requests.
        if not self._key and not _is_local(host):
            message = (
                f"this server is reached as localhost or by its address, not as {host[:200]!r}"
            )
            raise ApiError(403, message, code="wrong_host")
        if scope["method"] == "POST" and origin and origin.partition("://")[2] != host:
            message = f"requests from pages of {origin[:200]} are not taken"
            raise ApiError(403, message, code="cross_origin")


def _no_route(error: HTTPException, scope: Scope) -> ApiError:
    """Return the response to an error of the router: an unknown path or a wrong method."""
    path = scope["path"]
    if error.status_code == 404:
        return ApiError(404, f"there is no {path} here; the API is at /v1", code="not_found")
    named = ApiError(
        error.status_code, f"{path} does not accept {scope['method']}", code="method_not_allowed"
    )
    named.headers.update(error.headers or {})
    return named


def _is_local(host: str) -> bool:
    """Whether a Host header is an address, or a name that no other site can have."""
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
        return f".{name}".endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
