"""The HTTP process."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.registry import Collector

from stepscope.engine.http.engine_client import HELLO_S, EngineClient
from stepscope.engine.http.metrics.exposition import Exposition
from stepscope.engine.http.metrics.follower import TelemetryFollower
from stepscope.engine.http.metrics.reducer import EngineMetrics
from stepscope.engine.http.server.app import Api, build_app
from stepscope.engine.http.server.connection import IDLE_S, Connection
from stepscope.engine.http.settings import Address, HttpSettings
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.rate_limit import allow_many_files

log = logging.getLogger("stepscope.http")

GRACE_S = 3.0  # for open streams to finish at shutdown, before they end with an error
STALLED_MS = 60_000  # a connection whose client reads nothing for this long is closed
# The kernel's send buffer of each connection. By default it grows to megabytes for a client that
# does not read, but a stream needs little.
SEND_BUFFER = 128 * 1024
FIRST_LOOK_S = HELLO_S  # how long to look for the engine before accepting requests
BACKLOG = 2048
ORPHAN_S = 1.0  # from the end of the engine that started this server to closing connections
_POLL_S = 0.05
_SPARE_FILES = 64  # open files for other uses than connections


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


def bound_address(listener: socket.socket) -> Address:
    """Return the address of a listening socket, with its actual port."""
    host, port = listener.getsockname()[:2]
    return Address(str(host), int(port))


def serve_http(
    settings: HttpSettings,
    endpoint: Endpoint,
    listener: socket.socket,
    *,
    parent_gone: threading.Event | None = None,
    found: Callable[[EngineInfo], None] = lambda info: None,
    collectors: Iterable[Collector] = (),
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    `parent_gone`: set when the engine that started this process is gone. The server then frees its
    port, ends open requests with an error, and exits.
    """
    most = min(settings.max_connections, allow_many_files() - _SPARE_FILES)
    serving = _serve(settings, endpoint, listener, most, parent_gone, found, collectors)
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises the signal again once it has shut down
    with contextlib.suppress(KeyboardInterrupt, _Leave):
        _loop_factory().run(serving)


async def _serve(
    settings: HttpSettings,
    endpoint: Endpoint,
    listener: socket.socket,
    max_connections: int,
    parent_gone: threading.Event | None,
    found: Callable[[EngineInfo], None],
    collectors: Iterable[Collector],
) -> None:
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
            async with asyncio.timeout(FIRST_LOOK_S):
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


class _Leave(BaseException):
    """Raised by SIGTERM after uvicorn's shutdown, to leave the event loop."""


def _leave(number: int, frame: FrameType | None) -> None:
    raise _Leave


def _loop_factory() -> asyncio.Runner:
    try:
        import uvloop
    except ModuleNotFoundError:  # uvloop does not support this platform
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
