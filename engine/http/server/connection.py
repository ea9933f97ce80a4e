"""`Connection`: one client's connection to the HTTP port; `Guard`: what each request must pass.

Without the limits of `Connection`, uvicorn's own protocol accepts a head of any size, waits for it
as long as it takes, and adds trailers to the headers, all before the API key is checked.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import uuid
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from stepscope.engine.http.errors import ApiError, internal_error, unavailable
from stepscope.engine.http.metrics.exposition import Exposition
from stepscope.engine.http.openai.streaming import send_json

MAX_HEAD_BYTES = 32 * 1024  # that may come without a whole head or a piece of a body
MAX_HEAD_LINES = 128
MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one
HEAD_S = 10.0  # for a whole head, and for the rest of a body whose request is already answered
IDLE_S = 75.0  # between an answer and the next request
LINGER_S = 2.0  # for the client to read its last answer
# Bytes passed to the parser at once. The limit is checked after each slice.
_SLICE = 16 * 1024


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. `most`: connections that the server may have."""

    def __init__(
        self,
        most: int,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most = most
        # What comes next, or is being received. "silent": nothing has come yet.
        self._expected: Literal["silent", "head", "body", "next"] = "silent"
        self._num_bytes = 0  # since the last whole head or piece of a body
        self._is_refused = False  # nothing more is read; it is closed after the answers under way
        self._timer: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            message = f"this server has {self._most} connections already; try again later"
            self._refuse(unavailable(message, "too_many_connections"))
            transport.close()  # at once, because there are already too many connections
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_refused = True
        self._unset_keepalive_if_required()
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._expected in ("silent", "next"):
            self._expected = "head"
        view = memoryview(data)
        for begin in range(0, len(view), _SLICE):
            if self._is_refused or self.transport.is_closing():
                return  # discard the data
            self._feed(view[begin : begin + _SLICE])
        self._watch()

    def _feed(self, part: memoryview) -> None:
        self._num_bytes += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # Answer the request without the upgrade. The bytes after it are not HTTP.
            self._is_refused = True
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "this is no valid HTTP request"))
        if self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    # Called by the parser

    def on_message_begin(self) -> None:
        self._expected = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._expected != "head":
            return  # a trailer
        if len(self.headers) == MAX_HEAD_LINES:
            self._refuse(_head_too_large())
            raise httptools.HttpParserError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests wait for their answer")
        self._expected, self._num_bytes = "body", 0
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            _send_plainly(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expected, self._num_bytes = "next", 0
        super().on_message_complete()

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_refused:
            self._watch()
        elif not self._is_answering:
            self._hang_up()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Time limits

    def _watch(self) -> None:
        """Start the timer if something must come from the client now; stop it if nothing must."""
        if self._is_refused:
            return
        if self._is_answering or self._expected == "next":
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._expected == "head":
            message = f"the head of the request did not come within {HEAD_S:g} s"
            self._refuse(ApiError(408, message, code="timeout"))
        else:
            self._hang_up()

    # Refusing

    def _refuse(self, error: ApiError) -> None:
        """Stop reading, send the error unless an answer is under way, and disconnect."""
        if self._is_refused:
            return
        self._is_refused = True
        if self._is_answering:
            if self._expected != "body" or self.pipeline or self.cycle.response_started:
                return  # the connection ends after the answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(self._refusal_bytes(error))
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection after a delay: at once, unread data would reset it."""
        self._is_refused = True
        self._unset_keepalive_if_required()
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _refusal_bytes(self, error: ApiError) -> bytes:
        body = error.body
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        status = HTTPStatus(error.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join([*lines, b"", body])


def _send_plainly(cycle: RequestResponseCycle) -> None:
    """Let the answer to an HTTP/1.0 client, which knows no chunks, end with the connection."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.waiting_for_100_continue = False
    cycle.send = send_plain  # type: ignore[method-assign]


def _head_too_large() -> ApiError:
    most = f"{MAX_HEAD_LINES} lines and {MAX_HEAD_BYTES} bytes"
    return ApiError(431, f"the head of a request has at most {most}", code="head_too_large")


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
        self._key_hash = _hash(api_key.encode()) if api_key else None
        self._exposition = exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["stepscope.request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            self._check_key(scope)
            self._check_host(scope)
            self._check_origin(scope)
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await send_json(send_named, error.status, error.body, error.headers)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                answer = internal_error()
                await send_json(send_named, answer.status, answer.body)
        finally:
            self._exposition.count_request(scope["path"], status)

    def _check_key(self, scope: Scope) -> None:
        if self._key_hash is None or not scope["path"].startswith(_GUARDED):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compare hashes of equal length, so that the time reveals nothing about the key.
        is_key = hmac.compare_digest(_hash(key.encode("latin-1")), self._key_hash)
        if not is_key or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "no valid API key was sent: set it in the client (Authorization: Bearer KEY)",
                code="invalid_api_key",
            )

    def _check_host(self, scope: Scope) -> None:
        """Raise ApiError if the Host header is malformed, or names a foreign host without a key.

        If the server needs no key, it is on the loopback address. A web page may let its own host
        name resolve to that address (DNS rebinding). The page's requests then look like same-site
        requests.
        """
        given = Headers(scope=scope).get("host", "")
        try:
            host = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            raise ApiError(
                400, f"the Host header is no name or address: {given[:200]!r}", code="bad_host"
            ) from None
        if self._key_hash is not None:
            return
        if host == "localhost" or host.endswith(".localhost") or _is_address(host) or not host:
            return
        raise ApiError(
            403,
            f"this server is reached as localhost or by its address, not as {host[:200]!r}",
            code="wrong_host",
        )

    def _check_origin(self, scope: Scope) -> None:
        """Refuse requests that a browser sends for pages of other sites the user visits."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope["method"] != "POST" or origin is None:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise ApiError(
                403, f"requests from pages of {origin[:200]} are not taken", code="cross_origin"
            )


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
