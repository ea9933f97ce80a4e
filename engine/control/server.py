"""`ControlServer`: the control socket and the thread that serves it.

The thread decodes, checks and answers commands. A change goes into the engine's inbox, and is
applied between two steps. Large answers are prepared on a separate thread (`BulkReplies`). The
engine's replies pass through an outbox, because a ZeroMQ socket belongs to one thread.
"""

import logging
import math
import threading
from collections.abc import Callable

import msgspec
import zmq

from stepscope.engine.control.intake import Changes, Intake, Submissions
from stepscope.engine.control.outgoing import (
    BulkQuestion,
    BulkReplies,
    Outgoing,
    RemoteClient,
    Replies,
    ServedEngine,
)
from stepscope.engine.loop.dispatch import error_reply
from stepscope.engine.loop.inbox import Denial, Departure, WakingQueue
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import AnyCommand, Change, GetInfo, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Error, Output, Replayed, Submitted
from stepscope.engine.text.tokenizer import OutputText, Tokenizer
from stepscope.engine.transport.connections import Connections
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.rate_limit import RateLimiter
from stepscope.engine.transport.sockets import bind, server_socket

log = logging.getLogger("stepscope.engine")

CLIENT_QUEUE = 100_000  # replies that may wait for a client before its requests are ended
RECEIVE_QUEUE = 8  # commands of one client that wait here; further ones wait on its side
MAX_AT_ONCE = 32  # commands received before replies are sent


class ControlServer:
    """Serves a ROUTER socket on its own thread.

    `gate`: decides which clients may connect. None: every client is an operator.

    Raises ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        engine: ServedEngine,
        intake: Intake,
        tokenizer: Tokenizer | None,
        replay: Callable[[int, int], Replayed],
        gate: Gate | None = None,
    ) -> None:
        self._engine = engine
        self._tally = engine.control_tally
        self._limiter = RateLimiter()
        charge = self._limiter.charge_text
        self._submissions = Submissions(engine.inbox, intake, engine.clock, charge)
        self._tokenizer = tokenizer
        self._outbox: WakingQueue[Outgoing] = WakingQueue()
        self._closing = False
        self._socket = server_socket(zmq.ROUTER, gate)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, CLIENT_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        # So that sending to a client that is gone raises an error.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # libzmq disconnects a client that sends more. Commands up to here get a proper answer.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * commands.MAX_COMMAND_BYTES)
        self._connections = Connections(self._socket, gate)
        self._replies = Replies(self._socket, self._connections, self._forget)
        self._changes = Changes(engine.inbox, self._connections, self._replies.send)
        bind(self._socket, address)
        self._bulk = BulkReplies(engine, replay, self._outbox.post)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, after it has sent what is still in the outbox."""
        self._closing = True
        self._submissions.close()
        self._bulk.close()
        self._outbox.wake()
        self._thread.join()
        self._outbox.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        outbox = self._outbox.descriptor
        poller.register(outbox, zmq.POLLIN)
        poller.register(self._connections.lost, zmq.POLLIN)
        try:
            while True:
                pause_s = self._limiter.pause_s()
                # During a pause, do not read the socket: unread commands wait with their senders.
                poller.register(self._socket, 0 if pause_s else zmq.POLLIN)
                ready = dict(poller.poll(math.ceil(pause_s * 1000) if pause_s else None))
                if outbox in ready:
                    self._outbox.awake()
                # Read the flag first, so that everything posted before `close` is sent.
                is_last = self._closing
                self._send_outbox()
                if is_last:
                    return
                if self._connections.lost in ready:
                    self._forget_lost(self._connections.take_lost())
                if self._socket in ready:
                    self._receive_some()
        finally:
            self._connections.close()
            self._socket.close()

    # Requests

    def _receive_some(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._receive(received)
            except Exception:
                # A bug of ours, but the other clients must still be answered.
                log.exception("a message to the control socket was not dealt with")
            if self._limiter.pause_s():
                return

    def _receive(self, received: list[zmq.Frame]) -> None:
        frames = [frame.bytes for frame in received]
        identity, command_id = frames[0], frames[1] if len(frames) > 1 else b""
        self._forget_lost(self._connections.note(identity, received[-1]))
        if not self._connections.is_welcome(identity):
            return  # its key is revoked, and its connection is being closed
        account = self._connections.account(identity)
        answer_id = command_id[:8].rjust(8, b"\0")
        if not self._limiter.admit(account, sum(map(len, frames))):
            self._tally.num_limited += 1
            message = f"too many commands; try again in {self._limiter.wait_s(account):.2g} s"
            self._replies.send(identity, answer_id, Error(code="rate_limited", message=message))
            return
        try:
            if len(frames) != 3 or len(command_id) != 8:
                shape = ", ".join(str(len(frame)) for frame in frames[1:][:8])
                raise msgspec.DecodeError(
                    "expected the frames [id of 8 bytes, msgpack command], got "
                    f"{len(frames) - 1} frames, of {shape or 'no'} bytes"
                )
            command = commands.decode_command(frames[2])
        except msgspec.DecodeError as error:
            self._tally.num_bad_messages += 1
            self._limiter.charge(account, None)
            self._replies.send(identity, answer_id, Error(code="bad_message", message=str(error)))
            return
        self._limiter.charge(account, command)
        try:
            self._handle(identity, command_id, command, frames[2])
        except Exception as error:  # noqa: BLE001 - it is logged
            reply = error_reply(error, type(command).__name__)
            if reply.code == "viewer":
                self._limiter.charge(account, None)
            self._replies.send(identity, command_id, reply)

    def _handle(
        self, identity: bytes, command_id: bytes, command: AnyCommand, payload: bytes
    ) -> None:
        account = self._connections.account(identity)
        client = RemoteClient(self._outbox.post, identity, command_id, account)
        if isinstance(command, GetInfo):
            self._replies.send(identity, command_id, self._engine.info)
        elif isinstance(command, BulkQuestion):
            client.is_bulk = True
            self._bulk.begin(command, client)
        elif isinstance(command, Submit):
            self._check_role(identity, command, command.client_id)
            most = self._engine.max_waiting
            if self._engine.inbox.qsize() >= most:
                message = f"{most} commands are waiting already; try again later"
                raise ConfigError("queue_full", message)
            client.text = OutputText(self._tokenizer, command)
            self._submissions.accept(command, client)
        else:
            self._check_role(identity, command, command.who)
            self._changes.apply(client, command, payload)

    def _check_role(self, identity: bytes, command: Submit | Change, who: str) -> None:
        """Raise ConfigError if the client's key is a viewer's. The audit trail gets the refusal."""
        holder = self._connections.holder(identity)
        if holder is None or holder.role == "operator":
            return
        self._tally.num_denied += 1
        message = f"the key of {holder.name} is a viewer's; {command.doing} takes an operator's key"
        asker = self._connections.asker(identity, who)
        lane = self._connections.account(identity)
        name = type(command).__name__
        self._engine.inbox.put(Denial(asker, name, "viewer", message, lane=lane))
        raise ConfigError("viewer", message)

    # Replies

    def _send_outbox(self) -> None:
        for client, message in self._outbox.take():
            if isinstance(message, Submitted):
                self._connections.add_request(client.identity, message.request_id)
            elif isinstance(message, Output):
                if message.finish_reason is not None:
                    self._connections.end_request(client.identity, message.request_id)
                if client.text is not None:
                    message = client.text.complete(message)
                self._replies.bundle(client.identity, client.command_id, message)
                continue
            elif client.is_bulk and not isinstance(message, msgspec.Raw | Error):
                self._bulk.answer(client, message)
                continue
            elif isinstance(message, msgspec.Raw):
                self._limiter.charge_bytes(client.account, len(bytes(message)))
            self._replies.send(client.identity, client.command_id, message)
            if client.once is not None and not isinstance(message, msgspec.Raw):
                self._changes.answered(client.once, message)
        self._replies.send_bundles()

    # Clients that are gone

    def _forget_lost(self, gone: list[bytes]) -> None:
        for identity in gone:
            self._forget(identity, "its connection is closed")

    def _forget(self, identity: bytes, why: str) -> None:
        self._submissions.forget(identity)
        self._bulk.forget(identity)
        requests = self._connections.take_requests(identity)
        if requests:
            log.info("a client is gone (%s): its %d requests are ended", why, len(requests))
        for request_id in requests:
            self._engine.inbox.put(Departure(request_id, lane=identity))
