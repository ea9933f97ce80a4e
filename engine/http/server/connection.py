"""`Connection`: one client's connection to the HTTP port, with limits on sizes and times.

Without these limits, uvicorn's own protocol accepts a head of any size, waits for the head as long
as it takes, keeps any number of pipelined requests, and adds trailers to the headers. All of that
happens before the API key is checked.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from stepscope.engine.http.errors import ApiError, unavailable
from stepscope.engine.http.peers import PeerLimit, peer_of

MAX_HEAD_BYTES = 32 * 1024  # request line, headers and trailers
MAX_HEAD_LINES = 128
MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one
HEAD_S = 10.0  # for a whole head, from the connection or from its first byte
IDLE_S = 75.0  # between an answer and the next request
REST_S = 10.0  # for the rest of a body whose request is already answered
LINGER_S = 2.0  # for the client to read its last answer
# Bytes passed to the parser at once. Limits are checked after each slice.
_SLICE = 16 * 1024

_Phase = Literal["head", "answer", "rest", "idle", "refused"]
_LIMITS_S: dict[_Phase, float] = {"head": HEAD_S, "rest": REST_S, "idle": IDLE_S}


class _TooMuch(Exception):  # noqa: N818 - the parser turns it into an error of its own
    pass


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits."""

    def __init__(
        self,
        peers: PeerLimit,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._peers = peers
        self._peer: str | None = None  # set once the connection is counted
        self._phase: _Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None  # why the parser was stopped
        # State of the message being received:
        self._has_head = False
        self._is_whole = True
        self._num_head_bytes = 0
        self._num_lines = 0
        self._num_unheard = 0  # bytes since the parser last reported anything
        self._was_heard = False

    # Called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = peer_of(self.client[0] if self.client else None)
        limit = self._peers.add(peer)
        if limit is None:
            self._peer = peer
            self._look()
            return
        whose, most, then = "you have", self._peers.most_each, "close some"
        if limit == "all":
            whose, most, then = "this server has", self._peers.most, "try again later"
        message = f"{whose} {most} connections already; {then}"
        self._refuse(unavailable(message, "too_many_connections"))
        transport.close()  # at once, because there are already too many connections

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._enter("refused")
        self._stop_timer()
        if self._peer is not None:
            self._peers.remove(self._peer)
            self._peer = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        view = memoryview(data)
        for begin in range(0, len(view), _SLICE):
            if self._phase == "refused" or self.transport.is_closing():
                return  # discard the data
            self._feed(view[begin : begin + _SLICE])
        self._look()

    def _feed(self, part: memoryview) -> None:
        self._was_heard = False
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # Answer the request without the upgrade. The bytes after it are not HTTP.
            self._end_after_answer()
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "this is no valid HTTP request"))
            return
        self._num_unheard = 0 if self._was_heard else self._num_unheard + len(part)
        if self._num_unheard > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    # Called by the parser

    def on_message_begin(self) -> None:
        self._was_heard = True
        self._has_head = self._is_whole = False
        self._num_head_bytes = self._num_lines = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_lines += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if not self._has_head:  # else it is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._was_heard = True
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooMuch
        super().on_headers_complete()
        self._has_head = True
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            _send_plainly(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._was_heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._was_heard = True
        self._is_whole = True
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._was_heard = True
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_lines > MAX_HEAD_LINES:
            self._refusal = _head_too_large()
            raise _TooMuch

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase != "refused":
            self._look()
        elif not self._is_answering:
            self._hang_up()

    # The phases and their time limits

    def _look(self) -> None:
        if self._phase == "refused":
            return
        if self._is_answering:
            self._enter("answer")
        elif self.cycle is None or self._num_unheard or not (self._is_whole or self._has_head):
            self._enter("head")
        else:
            self._enter("idle" if self._is_whole else "rest")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _enter(self, phase: _Phase) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        self._stop_timer()
        if (limit_s := _LIMITS_S.get(phase)) is not None:
            self._timer = self.loop.call_later(limit_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._phase == "head" and (self._num_unheard or not self._is_whole):
            message = f"the head of the request did not come within {HEAD_S:g} s"
            self._refuse(ApiError(408, message, code="timeout"))
        else:
            self._hang_up()

    # Refusing

    def _end_after_answer(self) -> None:
        self._enter("refused")
        if not self._is_answering:
            self._hang_up()

    def _refuse(self, error: ApiError) -> None:
        """Stop reading, send the error and disconnect."""
        if self._is_answering:
            is_its_own = self._has_head and not self._is_whole and not self.pipeline
            if not is_its_own or self.cycle.response_started:
                self._end_after_answer()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._enter("refused")
        self.transport.write(self._refusal_bytes(error))
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection after a delay: at once, unread data would reset it."""
        self._enter("refused")
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        if self._timer is None:
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
    return ApiError(
        431,
        f"the head of a request has at most {MAX_HEAD_LINES} lines and {MAX_HEAD_BYTES} bytes",
        code="head_too_large",
    )
