"""The HTTP process, and `Connection`: what one client's connection may hold, and for how long."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import httptools
import uvicorn
from prometheus_client.registry import Collector
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stepscope.engine.http.app import Api, build_app
from stepscope.engine.http.engine_client import HELLO_S, EngineClient
from stepscope.engine.http.exposition import Exposition, TelemetryFollower
from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.http.settings import Address, HttpSettings
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.rate_limit import allow_many_files

log = logging.getLogger("stepscope.http")

GRACE_S = 3.0  # for open streams to finish at shutdown, before they end with an error
STALLED_MS = 60_000  # a connection whose client reads nothing for this long is closed
# The kernel's send buffer of each connection. By default it grows to megabytes for a client that
# does not read, but a stream needs little.
SEND_BUFFER = 128 * 1024
BACKLOG = 2048
ORPHAN_S = 1.0  # from the end of the engine that started this server to closing connections
_POLL_S = 0.05
_SPARE_FILES = 64  # open files for other uses than connections
MAX_HEAD_BYTES = 32 * 1024  # that may come without a whole head or a piece of a body
MAX_HEAD_LINES = 128
MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one
HEAD_S = 10.0  # for a whole head, and for the rest of a body whose request is already answered
IDLE_S = 75.0  # between an answer and the next request
_SLICE = 16 * 1024  # bytes passed to the parser at once: the limit is checked after each


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits: what goes beyond one ends the connection.

    uvicorn's own accepts a head of any size and waits for it for ever, before the key is checked.
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


def listen(address: Address) -> socket.socket:
    """Return a listening socket. Raises ConfigError: the address cannot be bound."""
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
            listener.bind(where)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            "bad_address", f"cannot listen on {address.text}: {error.strerror or error}"
        ) from error
    return listener


def run_until_signal(serving: Coroutine[Any, Any, None]) -> None:
    """Run `serve_http` until SIGINT, SIGTERM or SIGHUP."""
    # uvicorn raises the signal again once it has shut down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.Runner(loop_factory=auto_loop_factory()).run(serving)


async def serve_http(
    settings: HttpSettings,
    endpoint: Endpoint,
    listener: socket.socket,
    parent_gone: threading.Event | None,
    found: Callable[[EngineInfo], None],
    collectors: Iterable[Collector],
) -> None:
    """Serve the engine at an endpoint.

    `parent_gone`: set when the engine that started this process is gone. The server then frees its
    port, ends open requests with an error, and exits.
    """
    metrics = EngineMetrics()
    exposition = Exposition(metrics, settings.served_model_name, collectors)
    following: asyncio.Task[None] | None = None

    def on_change() -> None:
        nonlocal following
        exposition.is_engine_up = engine.info is not None
        if following is not None:
            following.cancel()
            following = None
        if engine.info is not None:
            found(engine.info)
            following = asyncio.create_task(TelemetryFollower(engine, metrics).run())
        # Expected at shutdown, and with a parent, whose end also ends this server.
        elif parent_gone is None and not server.should_exit:
            log.warning("the engine at %s is gone", endpoint.control)

    engine = EngineClient(endpoint, on_change)
    api = Api(settings, engine, exposition)
    max_connections = min(settings.max_connections, allow_many_files() - _SPARE_FILES)
    # uvicorn calls this like a protocol class.
    protocol: Any = functools.partial(Connection, max_connections)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(api),
            http=protocol,
            access_log=False,
            log_config=None,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=int(GRACE_S) + 2,
        )
    )
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM
    )

    def stop_on_failure(task: asyncio.Task[None]) -> None:
        # Without the task, the server would only seem to work.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the server ends: %r", error, exc_info=error)
            server.should_exit = True

    tasks = [asyncio.create_task(each) for each in (engine.run(), _end(server, api, parent_gone))]
    for task in tasks:
        task.add_done_callback(stop_on_failure)
    try:
        # Connections made meanwhile wait in the socket's queue instead of getting a 503.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_S):
                while engine.info is None:
                    await asyncio.sleep(_POLL_S)
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(server: uvicorn.Server, api: Api, parent_gone: threading.Event | None) -> None:
    """End all open requests, once the server shuts down or its parent, the engine, is gone."""
    while not server.should_exit:
        if parent_gone is not None and parent_gone.is_set():
            server.should_exit = True
            api.engine.close("the engine is gone; try again when it is back")
            # After this, only clients that do not read are still connected.
            await asyncio.sleep(ORPHAN_S)
            server.force_exit = True
            return
        await asyncio.sleep(_POLL_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            while api.num_in_flight:
                await asyncio.sleep(_POLL_S)
    api.engine.close("this server is shutting down")
