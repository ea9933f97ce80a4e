"""`ControlServer`: the control socket and the thread that serves it.

It decodes, prepares and answers; what changes the engine goes into the core's inbox and is applied
between two steps. Replies of the core come back through an outbox, because a ZeroMQ socket belongs
to one thread.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from stepscope.engine import commands
from stepscope.engine.commands import (
    Abort,
    Ack,
    AnyCommand,
    AnyReply,
    Error,
    GetInfo,
    Output,
    Replayed,
    ReplayFrom,
    SetWorkload,
    Submit,
    Submitted,
    WorkloadSpec,
)
from stepscope.engine.config import ConfigError
from stepscope.engine.core import EngineCore
from stepscope.engine.inbox import Call, Refusal
from stepscope.engine.intake import Intake, num_chars
from stepscope.engine.output_text import OutputText

if TYPE_CHECKING:
    from stepscope.engine.tokenizer import Tokenizer

log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; so many are tokenised in some 10 ms
MAX_LONG_TEXTS = 64
CLIENT_QUEUE = 100_000  # replies that may wait for a client before its requests are ended


class _Outgoing(NamedTuple):
    client: "RemoteClient"
    message: AnyReply


class RemoteClient:
    """One command of one client of the socket; the core answers to it.

    `text` completes the outputs of a `Submit`.
    """

    def __init__(
        self,
        server: "ControlServer",
        identity: bytes,
        command_id: bytes,
        text: OutputText | None = None,
    ) -> None:
        self.server = server
        self.identity = identity
        self.command_id = command_id
        self.text = text

    def reply(self, message: AnyReply) -> None:
        self.server.post(_Outgoing(self, message))


class ControlServer:
    """Serves a ROUTER socket on a thread of its own.

    Args:
        address: ZeroMQ address to bind.
        core: whose inbox is filled.
        intake: checks and tokenises prompts.
        tokenizer: turns output tokens into text, None when the engine has none.
        replay: answers `ReplayFrom` (`Publisher.replay`).
        set_workload: starts, replaces or (None) stops the engine's own workload.
    """

    def __init__(
        self,
        address: str,
        core: EngineCore,
        intake: Intake,
        tokenizer: "Tokenizer | None",
        replay: Callable[[int, int], Replayed],
        set_workload: Callable[[WorkloadSpec | None], None],
    ) -> None:
        self._core = core
        self._intake = intake
        self._tokenizer = tokenizer
        self._replay = replay
        self._set_workload = set_workload
        self._outbox: deque[_Outgoing] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._requests: dict[bytes, set[int]] = {}  # unfinished ones of each client
        self._identities: dict[int, bytes] = {}  # of clients, by the file descriptor they come on
        # One thread: the tokenizer lets others run meanwhile, and cores are for the model.
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenising")
        self._long_texts = threading.Semaphore(MAX_LONG_TEXTS)  # that wait for it or are in it
        self._closing = False
        self.num_bad_messages = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, CLIENT_QUEUE)
        # A client that has vanished is an error then, which can be acted on.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # ... and where nothing is on its way to it, only the lost connection tells.
        self._disconnected: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
        )
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, commands.MAX_COMMAND_BYTES)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what is still in the outbox, then end the thread."""
        self._closing = True
        self._tokenising.shutdown(wait=False, cancel_futures=True)
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def post(self, outgoing: _Outgoing) -> None:
        """Queue a reply; from any thread."""
        self._outbox.append(outgoing)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._disconnected, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 65536)
                self._send_outbox()
                if self._closing:
                    return
                if self._disconnected in ready:
                    self._drop_disconnected()
                if self._socket in ready:
                    self._receive()
        finally:
            self._socket.disable_monitor()
            self._socket.close()

    # Requests

    def _receive(self) -> None:
        received = self._socket.recv_multipart(copy=False)
        frames = [frame.bytes for frame in received]
        self._note_connection(frames[0], received[-1])
        identity, command_id = frames[0], frames[1] if len(frames) > 1 else b""
        if len(frames) != 3 or len(command_id) != 8:
            self.num_bad_messages += 1
            shape = ", ".join(str(len(frame)) for frame in frames[1:])
            self._send(
                identity,
                command_id[:8].rjust(8, b"\0"),
                Error(
                    code="bad_message",
                    message="expected the frames [id of 8 bytes, msgpack command], got frames of "
                    f"{shape or 'no'} bytes",
                ),
            )
            return
        try:
            command = commands.decode_command(frames[2])
        except msgspec.DecodeError as error:
            self.num_bad_messages += 1
            self._send(identity, command_id, Error(code="bad_message", message=str(error)))
            return
        try:
            self._handle(identity, command_id, command)
        except ConfigError as error:
            self._send(identity, command_id, Error(code=error.code, message=str(error)))
        except Exception:
            log.exception("%s could not be answered", type(command).__name__)
            self._send(
                identity,
                command_id,
                Error(code="internal", message="the engine failed; its log says why"),
            )

    def _handle(self, identity: bytes, command_id: bytes, command: AnyCommand) -> None:
        if isinstance(command, GetInfo):
            self._send(identity, command_id, self._core.info)
        elif isinstance(command, ReplayFrom):
            self._send(identity, command_id, self._replay(command.sequence, command.limit))
        elif isinstance(command, SetWorkload):
            self._set_workload(command.workload)
            self._send(identity, command_id, Ack(effective_step=self._core.next_step))
        elif isinstance(command, Submit):
            text = OutputText(self._tokenizer, command)
            client = RemoteClient(self, identity, command_id, text)
            if num_chars(command) <= LONG_TEXT:
                self._submit(command, client)
            elif self._long_texts.acquire(blocking=False):
                self._tokenising.submit(self._submit_long, command, client)
            else:
                raise ConfigError(
                    "queue_full",
                    f"{MAX_LONG_TEXTS} long prompts wait to be tokenised already; try again later",
                )
        else:
            client = RemoteClient(self, identity, command_id)
            self._core.inbox.put(Call(command, client))

    def _submit(self, command: Submit, client: RemoteClient) -> None:
        try:
            token_ids = self._intake.prepare(command)
        except ConfigError as error:
            self._core.inbox.put(Refusal(command.client_id, str(error)))
            raise
        command = self._intake.fitted(command, len(token_ids))
        stop_text = self._intake.stop_text(command.sampling)
        self._core.inbox.put(Call(command, client, token_ids, stop_text))

    def _submit_long(self, command: Submit, client: RemoteClient) -> None:
        """On a thread of its own: megabytes take seconds, and all replies go through this one."""
        try:
            self._submit(command, client)
        except ConfigError as error:
            client.reply(Error(code=error.code, message=str(error)))
        except Exception:
            log.exception("a long prompt could not be tokenised")
            client.reply(Error(code="internal", message="the engine failed; its log says why"))
        finally:
            self._long_texts.release()

    # Connections

    def _note_connection(self, identity: bytes, frame: zmq.Frame) -> None:
        """Remember on which file descriptor a client comes: a lost connection tells only that."""
        descriptor = frame.get(zmq.SRCFD)
        assert isinstance(descriptor, int)
        if self._identities.get(descriptor) != identity:
            # Of another client before. That it is gone was told before the number was free again.
            self._drop_disconnected()
            self._identities[descriptor] = identity

    def _drop_disconnected(self) -> None:
        """End the requests of clients whose connection is lost."""
        while self._disconnected.poll(0):
            descriptor = recv_monitor_message(self._disconnected)["value"]
            identity = self._identities.pop(int(descriptor), None)
            if identity is not None:
                self._forget(identity, "its connection is closed")

    # Replies

    def _send_outbox(self) -> None:
        while self._outbox:
            client, message = self._outbox.popleft()
            if isinstance(message, Submitted):
                self._requests.setdefault(client.identity, set()).add(message.request_id)
            elif isinstance(message, Output):
                if message.finish_reason is not None:
                    self._requests.get(client.identity, set()).discard(message.request_id)
                if client.text is not None:
                    message = client.text.complete(message)
            self._send(client.identity, client.command_id, message)

    def _send(self, identity: bytes, command_id: bytes, message: AnyReply) -> None:
        try:
            self._socket.send_multipart(
                [identity, command_id, commands.encode(message)], zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            # Gone (EHOSTUNREACH), or its queue is full because it does not read (EAGAIN).
            self._forget(identity, str(error))

    def _forget(self, identity: bytes, why: str) -> None:
        requests = self._requests.pop(identity, set())
        if requests:
            log.info("a client is gone (%s): its %d requests are ended", why, len(requests))
        for request_id in sorted(requests):
            nobody = RemoteClient(self, identity, bytes(8))
            self._core.inbox.put(Call(Abort(request_id=request_id), nobody))
