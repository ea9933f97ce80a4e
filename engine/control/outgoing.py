"""The way of an engine's replies to its clients.

`Replies` sends them, on the thread that owns the socket. Most are outputs of one token, and sending
a message takes many times as long as encoding such an output. So if several outputs for a client
are ready, they go in one message (a bundle).

`BulkReplies` answers queries with large answers on its own thread. Every viewer may ask for
messages of the replay ring, snapshots and pages of the audit trail. However many ask, the thread
uses at most `SHARE` of one core, with answers so small that other threads get the GIL in time, and
sends at most `RATE` bytes a second, after a burst of `BURST`. Who asks the fewest questions at a
time is served first. The bytes of an answer are charged to the client, too
(`RateLimiter.charge_bytes`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import zmq

from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.dispatch import error_reply
from stepscope.engine.loop.inbox import Call, Inbox
from stepscope.engine.protocol import replies
from stepscope.engine.protocol.commands import GetAudit, GetKeptSnapshot, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import AnyReply, Bundle, Error, Output, Replayed
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.text.tokenizer import OutputText
from stepscope.engine.transport.connections import Connections
from stepscope.engine.transport.rate_limit import TokenBucket


@dataclass(slots=True, eq=False)
class RemoteClient:
    """The receiver of the answers to one command, at the client that sent it."""

    post: Callable[["Outgoing"], None]
    identity: bytes
    command_id: bytes
    # Identifies the client, on all of its connections, which share one lane of the engine's inbox.
    account: bytes
    text: OutputText | None = None
    once: tuple[bytes, bytes] | None = None  # of a change: its key in `Changes`
    is_bulk: bool = False  # whether `BulkReplies` sends the answer

    def reply(self, message: AnyReply) -> None:
        self.post((self, message))


# A reply for the thread that owns the socket. The engine's thread builds one for each token, and a
# plain tuple takes a tenth of the time of a class.
Outgoing: TypeAlias = tuple[RemoteClient, AnyReply | msgspec.Raw]


# The queue of a client that does not read is bounded by messages: more outputs in one would let it
# hold more memory, and would hardly be cheaper.
MAX_BUNDLE = 16
_BUNDLE_ID = bytes(8)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
# Bypasses the layer of pyzmq that handles options we do not use: it takes six times as long.
_send = zmq.backend.Socket.send


@dataclass(eq=False)
class Replies:
    """Sends replies through a ROUTER socket with ROUTER_MANDATORY."""

    socket: "zmq.Socket[bytes]"
    connections: Connections
    forget: Callable[[bytes, str], None]  # called with who cannot be reached, and why
    # Outputs that wait, by the client's identity; a client without any has no entry.
    _bundles: dict[bytes, list[tuple[int, Output]]] = field(default_factory=dict)

    def send(self, identity: bytes, command_id: bytes, message: AnyReply | msgspec.Raw) -> None:
        """Send a reply at once, but after outputs that wait in the client's bundle."""
        if (bundled := self._bundles.pop(identity, None)) is not None:
            self._send_bundle(identity, bundled)
        self._send(identity, command_id, message)

    def bundle(self, identity: bytes, command_id: bytes, output: Output) -> None:
        """Add an output to the client's bundle, which is sent when full, or by `send_bundles`."""
        if output.logprobs is not None or len(output.token_ids) > 1:
            self.send(identity, command_id, output)  # as large as a bundle
            return
        bundled = self._bundles.setdefault(identity, [])
        bundled.append((int.from_bytes(command_id, "big"), output))
        if len(bundled) == MAX_BUNDLE:
            del self._bundles[identity]
            self._send_bundle(identity, bundled)

    def send_bundles(self) -> None:
        bundles, self._bundles = self._bundles, {}
        for identity, bundled in bundles.items():
            self._send_bundle(identity, bundled)

    def _send_bundle(self, identity: bytes, bundled: list[tuple[int, Output]]) -> None:
        if len(bundled) == 1:
            ((command_id, output),) = bundled
            self._send(identity, command_id.to_bytes(8, "big"), output)
        else:
            self._send(identity, _BUNDLE_ID, Bundle(outputs=bundled))

    def _send(self, identity: bytes, command_id: bytes, message: AnyReply | msgspec.Raw) -> None:
        if not self.connections.is_welcome(identity):
            self.forget(identity, "its key is revoked")
            return
        try:
            _send(self.socket, identity, _MORE)
            # If the first frame found room in the queue, the other frames do too.
            _send(self.socket, command_id, _MORE)
            _send(self.socket, replies.encode(message), _LAST)
        except zmq.ZMQError as error:
            # Gone (EHOSTUNREACH), or its queue is full because it does not read (EAGAIN).
            self.forget(identity, str(error))


class ServedEngine(Protocol):
    """An engine, as the control socket uses it. Any thread may use all members."""

    inbox: Inbox
    control_tally: ControlTally
    info: EngineInfo
    kept_snapshots: KeptSnapshots
    max_waiting: int  # with this many commands in the inbox, a further `Submit` is refused

    @property
    def last_step(self) -> int: ...
    def clock(self) -> int: ...


SHARE = 0.02  # of one core's time
RATE, BURST = 4e6, 16e6  # bytes a second, bytes at once, to all clients together
MIN_BYTES = 65_536  # a smaller answer counts as this many bytes
MAX_PENDING = 64  # answers that one client waits for
MAX_REPLAY_FRAMES = 256  # in one answer; the client asks again for more

BulkQuestion: TypeAlias = ReplayFrom | GetSnapshot | GetKeptSnapshot | GetAudit
Made: TypeAlias = AnyReply | msgspec.Raw
Make: TypeAlias = Callable[[], Made]


class BulkReplies:
    """Gets large answers, and encodes and posts them at a limited rate. Any thread may call it."""

    def __init__(
        self,
        engine: ServedEngine,
        replay: Callable[[int, int], Replayed],
        post: Callable[[tuple[RemoteClient, msgspec.Raw | Error]], None],
    ) -> None:
        self._engine = engine
        self._replay = replay
        self._post = post
        self._waiting: dict[bytes, deque[tuple[RemoteClient, Make]]] = {}  # by account
        self._room = TokenBucket(RATE, BURST, time.monotonic())
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._last: tuple[Snapshot | None, msgspec.Raw] = (None, msgspec.Raw())
        self._thread = threading.Thread(target=self._run, name="bulk replies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop the open questions and end the thread."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join()

    def begin(self, command: BulkQuestion, client: RemoteClient) -> None:
        """Start to answer a query. Raises ConfigError if too many answers wait for the client."""
        if len(self._waiting.get(client.account, ())) >= MAX_PENDING:
            raise ConfigError("rate_limited", "too much of what you asked waits for an answer")
        if isinstance(command, ReplayFrom):
            limit = min(command.limit, MAX_REPLAY_FRAMES)
            self._queue(client, lambda: self._replay(command.sequence, limit))
        elif isinstance(command, GetKeptSnapshot):
            self.answer(client, self._kept_snapshot(command))
        else:
            self._engine.inbox.put(Call(command, client, lane=client.account))

    def answer(self, client: RemoteClient, reply: Made) -> None:
        """Queue the engine's answer to a query."""
        self._queue(client, lambda: reply)

    def forget(self, identity: bytes) -> None:
        """Drop the queued answers to a connection that is gone."""
        with self._changed:
            for account, waiting in list(self._waiting.items()):
                kept = deque(each for each in waiting if each[0].identity != identity)
                self._waiting[account] = kept
                if not kept:
                    del self._waiting[account]

    def _queue(self, client: RemoteClient, make: Make) -> None:
        with self._changed:
            self._waiting.setdefault(client.account, deque()).append((client, make))
            self._changed.notify()

    def _kept_snapshot(self, command: GetKeptSnapshot) -> msgspec.Raw | Error:
        engine, ring = self._engine, self._replay(0, 0)
        oldest, end, past_ns = ring.oldest_sequence, ring.next_sequence, round(command.past_s * 1e9)
        kept = engine.kept_snapshots
        payload = kept.before(past_ns, engine.clock(), engine.last_step, oldest, end)
        if payload is None:
            return Error(code="nothing_kept", message="the engine keeps no snapshot from that time")
        return msgspec.Raw(payload)

    # The thread

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            client, make = taken
            reply: msgspec.Raw | Error
            try:
                reply = self._made(make)
            except Exception as error:  # noqa: BLE001 - it is logged
                reply = error_reply(error, "an answer")
            self._post((client, reply))

    def _next(self) -> tuple[RemoteClient, Make] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            if self._closing.is_set():
                return None
            account = min(self._waiting, key=lambda each: len(self._waiting[each]))
            waiting = self._waiting.pop(account)
            taken = waiting.popleft()
            if waiting:
                self._waiting[account] = waiting  # behind others that wait for as many
            return taken

    def _made(self, make: Make) -> msgspec.Raw:
        # Measure only this thread's CPU time, without its waits for the GIL.
        began_s = time.thread_time()
        reply = make()
        if reply is self._last[0]:  # many clients ask for the same snapshot
            raw = self._last[1]
        else:
            raw = msgspec.Raw(replies.encode(reply))
            if isinstance(reply, Snapshot):
                self._last = (reply, raw)
        took_s = time.thread_time() - began_s
        self._room.spend(max(MIN_BYTES, len(bytes(raw))), time.monotonic())
        self._closing.wait(max(took_s * (1 / SHARE - 1), self._room.wait_s(0.0)))
        return raw
