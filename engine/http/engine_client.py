"""`EngineClient`: a lasting connection to the control socket of one engine, on an asyncio loop.

When the connection to the engine is lost, every open command fails at once. The client then
reconnects, each time with a new socket: a command sent to a dead engine must not reach an engine
started later at the same address.

`SocketReader` watches a socket's file descriptor and reads all waiting messages at once:
zmq.asyncio creates two futures per message, most of the process's work with one per token.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec
import zmq

from stepscope.engine.client.client import CommandRefused, EngineUnreachable, payload_of
from stepscope.engine.protocol import replies
from stepscope.engine.protocol.commands import Command, GetInfo
from stepscope.engine.protocol.replies import AnyReply, Bundle, Error
from stepscope.engine.protocol.wire import SCHEMA_VERSION, EngineInfo
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.sockets import client_socket

log = logging.getLogger("stepscope.http")

RETRY_S = 0.25
HELLO_S = 2.0
HEARTBEAT_MS = 1_000
SILENCE_MS = 5_000  # the engine counts as lost after this long without an answer to heartbeats
_BURST = 100  # messages read before other tasks on the loop get a turn

_T = TypeVar("_T")

# Receives the replies to a command: its id, and a reply, or why no more will come because the
# engine is lost. Called on the loop; it must not block.
Receive: TypeAlias = Callable[[int, AnyReply | EngineUnreachable], None]


class SocketReader:
    """Passes each message that arrives on a socket to `receive`, until `close`."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.FD)
        self._loop.add_reader(self._descriptor, self._drain)
        self.nudge()

    def nudge(self) -> None:
        """Check for messages. Call it after each send, which can clear the socket's read event."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._loop.remove_reader(self._descriptor)

    def _drain(self) -> None:
        if self.socket.closed:  # since this was scheduled
            return
        for _ in range(_BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)
        self.nudge()


class EngineClient:
    """Sends commands to one engine, and reconnects. `on_change`: called when either happens."""

    def __init__(self, endpoint: Endpoint, on_change: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.info: EngineInfo | None = None  # None while there is no engine
        self._on_change = on_change
        self._ids = itertools.count(1)
        self._receivers: dict[int, Receive] = {}
        self._reader: SocketReader | None = None
        self._lost = asyncio.Event()
        self._closed_because: str | None = None

    async def run(self) -> None:
        """Connect to the engine, and reconnect after every loss, until cancelled."""
        while True:
            await self._session()
            await asyncio.sleep(RETRY_S)

    def close(self, why: str) -> None:
        """Fail all open commands, and every later one, with the error `why`."""
        self._closed_because = why
        self._fail(EngineUnreachable(why))

    def send(self, command: Command, receive: Receive | None) -> int:
        """Send a command and return its id. Its replies go to `receive`, until `forget` is called.

        Raises:
            EngineUnreachable: there is no engine.
            CommandRefused: the command is too large.
        """
        reader, is_found = self._reader, self.info is not None or isinstance(command, GetInfo)
        if reader is None or not is_found or self._closed_because:
            raise EngineUnreachable(self._why_none())
        payload = payload_of(command)
        command_id = next(self._ids)
        try:
            reader.socket.send_multipart([command_id.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        except zmq.Again:  # not connected: the engine refuses our connection
            raise EngineUnreachable(self._why_none()) from None
        if receive is not None:
            self._receivers[command_id] = receive
        reader.nudge()
        return command_id

    def forget(self, command_id: int) -> None:
        self._receivers.pop(command_id, None)

    async def ask_for(self, kind: type[_T], command: Command, timeout_s: float) -> _T:
        """Send a command and wait for its single reply, of the given kind.

        Raises:
            EngineUnreachable: there is no engine, or it does not answer in time.
            CommandRefused: the engine answered with an error, or with another kind of reply.
        """
        answer: asyncio.Future[AnyReply | EngineUnreachable]
        answer = asyncio.get_running_loop().create_future()

        def receive(_: int, reply: AnyReply | EngineUnreachable) -> None:
            if not answer.done():
                answer.set_result(reply)

        command_id = self.send(command, receive)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            message = f"the engine did not answer within {timeout_s:g} s; is it paused?"
            raise EngineUnreachable(message) from None
        finally:
            self.forget(command_id)
        if isinstance(reply, EngineUnreachable):
            raise reply
        if isinstance(reply, Error):
            raise CommandRefused(reply.code, reply.message)
        if not isinstance(reply, kind):
            message = f"the engine answered with {type(reply).__name__}, not {kind.__name__}"
            raise CommandRefused("protocol", message)
        return reply

    # One connection

    async def _session(self) -> None:
        socket = client_socket(zmq.DEALER, self.endpoint)
        socket.rcvhwm = 0  # unlimited: messages are read at once, and each request limits its own
        socket.sndhwm = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost.clear()
        watch = SocketReader(monitor, lambda _: self._lost.set())
        self._reader = SocketReader(socket, self._receive)
        try:
            socket.connect(self.endpoint.here.control)
            self.info = await self._hello()
            if self.info is not None:
                log.info("found %s at %s", self.info.name, self.endpoint.control)
                self._on_change()
                await self._lost.wait()
                log.info("the engine at %s is gone", self.endpoint.control)
        finally:
            was_found = self.info is not None
            self.info = None
            self._reader.close()
            self._reader = None
            watch.close()
            socket.disable_monitor()
            socket.close()
            self._fail(EngineUnreachable("the engine is gone; try again when it is back"))
            if was_found:
                self._on_change()

    async def _hello(self) -> EngineInfo | None:
        try:
            info = await self.ask_for(EngineInfo, GetInfo(), HELLO_S)
        except (EngineUnreachable, CommandRefused) as error:
            log.debug("no engine: %s", error)
            return None
        if info.schema_version > SCHEMA_VERSION:
            log.error(
                "the engine at %s speaks schema %d, this program up to %d: install a newer one",
                *(self.endpoint.control, info.schema_version, SCHEMA_VERSION),
            )
            return None
        return info

    def _receive(self, frames: list[bytes]) -> None:
        try:
            identifier, payload = frames
            reply = replies.decode_reply(payload)
        except (ValueError, msgspec.DecodeError) as error:
            log.error("the engine sent what is no reply: %s", error)
            return
        answers = [(int.from_bytes(identifier, "big"), reply)]
        for command_id, each in reply.outputs if isinstance(reply, Bundle) else answers:
            if (receive := self._receivers.get(command_id)) is not None:
                receive(command_id, each)

    def _fail(self, error: EngineUnreachable) -> None:
        receivers, self._receivers = self._receivers, {}
        for command_id, receive in receivers.items():
            receive(command_id, error)

    def _why_none(self) -> str:
        return self._closed_because or f"no engine at {self.endpoint.control} at the moment"
