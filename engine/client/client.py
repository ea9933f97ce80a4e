"""`ControlClient`: sends commands to an engine over its control socket; and its errors.

Use a client from one thread.
"""

import itertools
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import zmq

from stepscope.engine.protocol import commands, replies
from stepscope.engine.protocol.commands import (
    Change,
    Command,
    GetInfo,
    GetKeptSnapshot,
    GetSnapshot,
    SetKnobs,
)
from stepscope.engine.protocol.replies import Ack, AnyReply, Bundle, Error
from stepscope.engine.protocol.wire import SCHEMA_VERSION, EngineInfo, KnobValue, Snapshot
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.local_engines import called, killed_pid, starting_pid
from stepscope.engine.transport.sockets import Handshakes, client_socket


class EngineUnreachable(Exception):  # noqa: N818 - reads as what happened
    """The engine could not be reached, or did not answer in time."""


class EngineSilent(EngineUnreachable):
    """No answer arrived in time, but the engine is not known to be gone."""


class NoAnswer(EngineUnreachable):
    """A change was sent and no answer arrived in time. The engine may still apply it."""


class EngineStarting(EngineUnreachable):
    """The engine's process runs, but does not listen yet."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(f"{name} (pid {pid}) is still starting")
        self.name = name
        self.pid = pid


class EngineGone(EngineUnreachable):
    """The engine has ended."""


class KeyRefused(EngineUnreachable):
    """The engine rejects our key, or asks for one; the message says what to do."""


class NoEngine(EngineUnreachable):
    """The program at the endpoint is not a stepscope engine that this client can talk to."""

    def __init__(self, endpoint: Endpoint, what: str) -> None:
        super().__init__(
            f"the program at {endpoint.control} is not a stepscope engine with schema "
            f"{SCHEMA_VERSION} ({what}); check the endpoint"
        )


class CommandRefused(Exception):  # noqa: N818
    """The engine answered with an error. Nothing was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


CHANGE_AGAIN_S = 1.0
_LOOK_S = 0.1  # how often `ask` checks whether the engine has rejected the key

_T = TypeVar("_T")


def payload_of(command: Command) -> bytes:
    """Return the encoded command.

    Raises CommandRefused: the command is larger than an engine accepts. If it were sent, the engine
    might close the connection without an answer, and all other commands on it be lost.
    """
    try:
        payload = commands.encode(command)
    except OverflowError:
        what = "a number in it has more than 64 bits; it was not sent"
        raise CommandRefused("too_big", what) from None
    if len(payload) > commands.MAX_COMMAND_BYTES:
        most = f"an engine takes at most {commands.MAX_COMMAND_BYTES:,} in one command"
        what = f"{type(command).__name__} has {len(payload):,} bytes, {most}; it was not sent"
        raise CommandRefused("too_big", what)
    return payload


class ControlClient:
    def __init__(self, endpoint: Endpoint | str, timeout_s: float = 3.0) -> None:
        self.endpoint = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._early: deque[tuple[int, AnyReply]] = deque()  # arrived while waiting for another
        self._given_up: set[int] = set()  # ids of commands whose answers are ignored
        self._engine_id = ""  # of the engine that answered last
        self._socket = client_socket(zmq.DEALER, self.endpoint)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, round(timeout_s * 1000))
        self._handshakes = Handshakes(self._socket, self.endpoint)
        self._socket.connect(self.endpoint.here.control)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._handshakes.close()
        self._socket.close()

    def send(self, command: Command) -> int:
        """Send without waiting for an answer. Returns the id that the replies will carry.

        Raises:
            EngineUnreachable: the engine does not read earlier commands, or rejects our key.
            CommandRefused: the command is too large.
        """
        payload = payload_of(command)
        command_id = next(self._ids)
        try:
            self._socket.send_multipart([command_id.to_bytes(8, "big"), payload])
        except zmq.Again:
            busy = f"the engine at {self.endpoint.control} is not reading commands at the moment"
            raise EngineUnreachable(self._handshakes.refusal() or busy) from None
        return command_id

    def idle(self) -> None:
        """Discard libzmq's events about the socket; call it once a minute: it blocks at 2000."""
        self._handshakes.refusal()

    def receive(
        self, timeout_s: float, or_readable: int | None = None
    ) -> tuple[int, AnyReply] | None:
        """Return the next reply to any command, with the command's id. Stops at `or_readable`."""
        if or_readable is not None and not self._early:
            poller = zmq.Poller()
            for each in (self._socket, or_readable):
                poller.register(each, zmq.POLLIN)
            poller.poll(round(timeout_s * 1000))
            timeout_s = 0
        if not self._early and (received := self._receive(timeout_s)) is not None:
            return received
        return self._early.popleft() if self._early else None

    def ask(
        self, command: Command, timeout_s: float | None = None, again_s: float | None = None
    ) -> AnyReply:
        """Send a command and wait for the answer.

        A change gets a unique name, so that the engine applies it only once, even if it is sent
        several times. The change also has the engine's id, so that a restarted engine does not
        apply it.

        `again_s`: send the command again after so many seconds without an answer, because messages
        in transit are lost with a connection. Only for commands that change nothing, and for
        changes, whose default is one second.

        Raises:
            EngineUnreachable: no answer in time (`EngineSilent`, or `NoAnswer` for a change, which
                was sent), or the answer is not from an engine (`NoEngine`).
            CommandRefused: the engine answered with an error.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        path = self.endpoint.path
        if path is not None and not path.exists():
            self._raise_if_known()
            if not path.exists():  # the engine may have started listening just now
                what = f"no engine at {self.endpoint.control}: there is no such socket"
                raise EngineUnreachable(what)
        again_s = again_s or (CHANGE_AGAIN_S if isinstance(command, Change) else timeout_s)
        if isinstance(command, Change):
            command = self._named(command)
        wanted = {self.send(command)}
        now_s = time.monotonic()
        deadline_s, next_s = now_s + timeout_s, now_s + again_s
        while (now_s := time.monotonic()) < deadline_s:
            if now_s >= next_s:
                wanted.add(self.send(command))
                next_s = now_s + again_s
            received = self._receive(min(next_s, deadline_s, now_s + _LOOK_S) - now_s)
            if received is None:
                if (refusal := self._handshakes.refusal()) is not None:
                    self._given_up |= wanted
                    raise KeyRefused(refusal)
                continue
            if received[0] not in wanted:
                self._early.append(received)
                continue
            self._given_up |= wanted - {received[0]}
            reply = received[1]
            if isinstance(reply, Error):
                raise CommandRefused(reply.code, reply.message)
            if isinstance(reply, EngineInfo):
                self._engine_id = reply.engine_id
            return reply
        self._given_up |= wanted
        self._raise_if_known()
        kind = NoAnswer if isinstance(command, Change) else EngineSilent
        raise kind(
            f"no engine answers at {self.endpoint.control} (waited {timeout_s:g} s); "
            "is it running? 'stepscope' alone lists those of this machine"
        )

    def _raise_if_known(self) -> None:
        if (pid := starting_pid(self.endpoint)) is not None:
            raise EngineStarting(called(self.endpoint), pid)
        if (pid := killed_pid(self.endpoint)) is not None:
            raise EngineGone(f"{called(self.endpoint)} is gone: killed or crashed (pid {pid})")

    def info(self, again_s: float | None = None, timeout_s: float | None = None) -> EngineInfo:
        return self._ask_for(EngineInfo, GetInfo(), timeout_s, again_s)

    def snapshot(self) -> Snapshot:
        return self._ask_for(Snapshot, GetSnapshot())

    def kept_snapshot(self, past_s: float) -> Snapshot | None:
        """Return the state of about `past_s` seconds ago, from a snapshot that the engine kept."""
        try:
            return self._ask_for(Snapshot, GetKeptSnapshot(past_s=past_s))
        except CommandRefused as error:
            if error.code == "nothing_kept":
                return None
            raise

    def set_knobs(
        self,
        changes: Mapping[str, KnobValue],
        who: str,
        expected_version: int | None = None,
        dry_run: bool = False,
        *,
        reason: str = "",
        lease_s: float | None = None,
    ) -> Ack:
        """Change knobs, with the fields of `SetKnobs`."""
        command = SetKnobs(
            changes=dict(changes), who=who, expected_version=expected_version, dry_run=dry_run,
            reason=reason, lease_s=lease_s,
        )  # fmt: skip
        return self._ask_for(Ack, command)

    def _named(self, command: Change) -> Change:
        """Return the change with a unique name and the engine's id."""
        return msgspec.structs.replace(
            command,
            once=command.once or uuid.uuid4().hex,
            engine_id=command.engine_id or self._engine_id or self.info().engine_id,
        )

    def _ask_for(self, kind: type[_T], command: Command, *waits_s: float | None) -> _T:
        reply = self.ask(command, *waits_s)
        if not isinstance(reply, kind):
            what = f"it sent {type(reply).__name__} in place of {kind.__name__}"
            raise NoEngine(self.endpoint, what)
        return reply

    def _receive(self, timeout_s: float) -> tuple[int, AnyReply] | None:
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return None
        frames = self._socket.recv_multipart()
        try:
            number, payload = frames
            command_id = int.from_bytes(number, "big")
            if command_id in self._given_up:
                self._given_up.discard(command_id)
                return None
            reply = replies.decode_reply(payload)
        except (ValueError, msgspec.DecodeError) as error:
            raise NoEngine(self.endpoint, "it sent what is no reply") from error
        if isinstance(reply, Bundle):
            self._early += reply.outputs
            return None
        return command_id, reply
