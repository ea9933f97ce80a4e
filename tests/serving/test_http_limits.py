"""Bounds on what a stranger can make the HTTP port hold, and for how long."""

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from stepscope.engine.http import server as server_module
from stepscope.engine.http.server import (
    MAX_HEAD_BYTES,
    MAX_HEAD_LINES,
    MAX_PIPELINED,
    Connection,
)

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ntransfer-encoding: chunked\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers, after the whole body, with its length and the names of the headers."""
    num_bytes, more = 0, True
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    while more and scope["path"] != "/unread":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
        more = message["more_body"]
    names = sorted(name.decode() for name, _ in scope["headers"])
    text = json.dumps({"bytes": num_bytes, "headers": names}).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a server with short timeouts and at most 3 connections."""
    monkeypatch.setattr(server_module, "HEAD_S", 0.3)
    protocol: Any = functools.partial(Connection, 3)
    config = uvicorn.Config(
        echo, http=protocol, lifespan="off", ws="none", log_config=None, timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        serving = asyncio.create_task(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


class LoopClock:
    """The time of the test's event loop, on which client and server run; it moves when told to."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._now_s = real()

    def __call__(self) -> float:
        return self._now_s

    def go_on(self) -> None:
        """Move by itself again, from where it stands."""
        real, ahead_s = self._real, self._now_s - self._real()
        asyncio.get_running_loop().time = lambda: real() + ahead_s  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        await self.deliver()
        self._now_s += seconds
        await self.deliver()

    async def deliver(self) -> None:
        """Let what was written be read, and the timers that are due fire."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(port: int) -> AsyncIterator[LoopClock]:
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop.time)
    loop.time = clock  # type: ignore[method-assign]
    yield clock
    clock.go_on()  # the server's end takes some


async def exchange(port: int, *sent: bytes, pause_s: float = 0.0) -> bytes:
    """Send the parts; return all bytes received until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        for each in sent:
            writer.write(each)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(20):
            while part := await reader.read(65536):
                received += part
    return bytes(received)


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"a" * 5_000_000,
        GET + b"x: " + b"a" * 5_000_000 + b"\r\n\r\n",
        GET + b"x: y\r\n" * 500_000,
        GET + b"x: y\r\n" * (MAX_HEAD_LINES + 1) + b"\r\n",
        GET + b"n" * 5_000_000,
        b"GET /" + b"a" * 5_000_000,
        b"\r\n" * 2_500_000,
        POST + b"\r\n0\r\n" + b"x: y\r\n" * 500_000,
        POST + b"\r\n0\r\nx: " + b"y" * 5_000_000,
        POST + b"\r\n1;" + b"e" * 5_000_000,
    ],
    ids=[
        *("unfinished line", "long line", "many lines", "a line too many", "name", "path"),
        *("empty lines", "trailers", "unfinished trailer", "chunk extension"),
    ],
)
async def test_an_http_head_without_end_is_refused(port: int, head: bytes) -> None:
    answer = await exchange(port, head)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400"), "unread data may reset it"


async def test_an_http_head_within_the_bounds_is_accepted(port: int) -> None:
    lines = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEAD_LINES - 3))
    line = b"long: " + b"z" * (MAX_HEAD_BYTES - len(lines) - 1_000) + b"\r\n"
    answer = await exchange(port, GET + lines + line + b"connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /he", GET, b"\r\n"], ids=["nothing", "a line", "lines", "empty line"]
)
async def test_an_unfinished_http_head_ends_the_connection(port: int, sent: bytes) -> None:
    assert await exchange(port, sent) == b""


async def test_an_http_head_sent_byte_by_byte_gets_no_extra_time(
    port: int, clock: LoopClock
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        for byte in GET[:20]:  # each comes well before the limit, which is over after the 15th
            writer.write(bytes([byte]))
            await clock.advance(0.02)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_an_idle_http_connection_is_closed_and_a_busy_one_is_not(
    port: int, clock: LoopClock
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        for _ in range(4):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readuntil(b"}")
            await clock.advance(0.9)
        await clock.advance(0.2)
        assert await reader.read() == b""


async def test_an_unread_request_body_does_not_keep_the_connection_open(port: int) -> None:
    head = b"POST /unread HTTP/1.1\r\nHost: a\r\ncontent-length: 1000000\r\n\r\n"
    began_s = asyncio.get_running_loop().time()
    await exchange(port, head, *[b"x"] * 200, pause_s=0.05)
    assert asyncio.get_running_loop().time() - began_s < 9, "it was cut off"


async def test_http_trailers_are_not_treated_as_headers(port: int) -> None:
    sent = POST + b"connection: close\r\n\r\n2\r\nab\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    _, _, text = (await exchange(port, sent)).partition(b"\r\n\r\n")
    assert json.loads(text) == {"bytes": 2, "headers": ["connection", "host", "transfer-encoding"]}


async def test_pipelined_requests_are_answered_in_order_up_to_a_bound(port: int) -> None:
    slow = GET.replace(b"health", b"slow") + b"\r\n"
    few = await exchange(port, slow + (GET + b"\r\n") * (MAX_PIPELINED - 1))
    assert few.count(b"HTTP/1.1 200") == MAX_PIPELINED
    many = await exchange(port, slow + (GET + b"\r\n") * 10_000)
    assert many.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_an_upgrade_request_is_answered_as_a_plain_request(port: int, upgrade: bytes) -> None:
    answer = await exchange(port, GET + b"connection: upgrade\r\nupgrade: " + upgrade + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


async def test_bytes_that_are_no_http_are_refused(port: int) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"):
        assert (await exchange(port, sent)).startswith(b"HTTP/1.1 400")


async def test_a_connection_above_the_limit_is_closed_until_another_closes(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert await exchange(port, GET + b"\r\n") == b""
    for _, writer in opened:
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.1)
    answer = await exchange(port, GET + b"connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
