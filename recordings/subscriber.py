"""`Subscriber`: the live source. Its thread owns the SUB socket and the control client.

It subscribes first and asks for a snapshot then, so that nothing falls between the two; messages
that are missing are asked for again, and what the engine does not have any more is counted as
lost. An engine that comes back is joined anew; whether it is the same one its id tells.
"""

import logging
import threading
import time
from typing import Literal, TypeAlias

import msgspec
import zmq

from stepscope.engine import wire
from stepscope.engine.access.sockets import RECONNECT_MS, client_socket
from stepscope.engine.client import (
    CommandRefused,
    ControlClient,
    EngineStarting,
    EngineUnreachable,
)
from stepscope.engine.commands import Error, GetSnapshot, Replayed, ReplayFrom
from stepscope.engine.endpoints import Endpoint
from stepscope.engine.wire import SCHEMA_VERSION, EngineInfo, Snapshot
from stepscope.recordings.history import History
from stepscope.recordings.source import FrameTap

log = logging.getLogger("stepscope.recordings")

STALE_S = 3.0  # an engine gives a sign of life every second
RETRY_S = 1.0
ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.4  # an answer may have been on a connection that was lost
SNAPSHOT_AGAIN_S = 4.0  # ... a snapshot is larger, and waits for the end of a step
SNAPSHOT_TIMEOUT_S = 30.0
RECEIVE_QUEUE = 50_000  # messages waiting in the socket
_DEAD_AFTER = 2.0  # times as long as makes it stale
_POLL_MS = 50
_BURST = 2_000  # messages taken before looking whether to stop
_REST_MS = 50  # for more to come: to wake up for each message costs more than to take it
_MAX_REPLAY = 2_000  # messages asked for at once, ...
_MIN_REPLAY = 20  # ... fewer where the way is so slow that the answer does not come in time
_TOPICS = frozenset(wire.TOPICS.values())
_KEYFRAME = wire.TOPICS[Snapshot]

LiveStatus: TypeAlias = Literal["starting", "connecting", "live", "stale", "down"]


class _JoinAgain(Exception):  # noqa: N818 - a turn of the loop, not an error
    """What comes now is not what was joined."""


class Subscriber:
    """Fills `history` from a running engine; implements `Source`.

    Args:
        endpoint: of the engine.
        history: to fill, a new one by default.
        stale_s: seconds without any message until the status is `stale`.
        retry_s: seconds between attempts to reach an engine that does not answer.
    """

    is_live = True

    def __init__(
        self,
        endpoint: Endpoint | str,
        history: History | None = None,
        stale_s: float = STALE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.endpoint = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.name = self.endpoint.name
        self.history = history if history is not None else History()
        self.tap = FrameTap()
        self.num_bad = 0
        self.num_healed = 0  # messages that were missing and came when asked for
        self._stale_s = stale_s
        self._retry_s = retry_s
        self._status: LiveStatus = "connecting"
        self._error: str | None = None
        self._bad: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)
        # Of the engine that is joined:
        self._engine_id = ""
        self._next_sequence = 0  # the one that continues the history
        self._last_published: int | None = None  # the last one that came by itself
        self._replay_limit = _MAX_REPLAY
        self._pending: Snapshot | None = None  # until the messages before it have come
        self._last_heard_s = 0.0
        self._next_probe_s = 0.0
        self._next_reconnect_s = 0.0
        self._doubt = False  # it was silent: it may be another one now

    @property
    def status(self) -> LiveStatus:
        return self._status

    @property
    def error(self) -> str | None:
        return self._error or self._bad

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except _JoinAgain:
                continue
            except EngineStarting as error:
                self._status = "starting"
                self._error = str(error)
            except (EngineUnreachable, CommandRefused) as error:
                if self._status != "connecting":
                    self._status = "down"
                self._error = str(error)
            except Exception as error:
                # Ours to repair, but no reason to lose the session that is on the screen.
                log.exception("the subscriber of %s failed and joins again", self.endpoint.control)
                self._status = "down"
                self._error = f"internal error, see the log: {error!r}"
            self._stopping.wait(self._retry_s)

    def _follow(self) -> None:
        """Join the engine and receive until something is wrong or all is over."""
        socket = client_socket(zmq.SUB, self.endpoint)
        # An engine that has come back in the place of another may go on with the very number that
        # is awaited: only the lost connection tells.
        disconnected = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(disconnected, zmq.POLLIN)
        resting = zmq.Poller()
        resting.register(disconnected, zmq.POLLIN)
        try:
            socket.linger = 0
            socket.rcvhwm = RECEIVE_QUEUE
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
            # No heartbeats: libzmq 4.3 aborts the process when one is due on a connection that was
            # lost while the receive queue was full. The engine's own signs of life serve as well.
            socket.connect(self.endpoint.telemetry)
            socket.subscribe(b"")
            with ControlClient(self.endpoint, ASK_TIMEOUT_S) as client:
                self._join(client)
                while not self._stopping.is_set():
                    ready = dict(poller.poll(_POLL_MS))
                    is_lost = disconnected in ready
                    if is_lost:
                        disconnected.recv_multipart()
                        self._doubt = True
                    if socket in ready:
                        if self._receive(socket, client):
                            self._rest(resting, socket, client)
                    elif is_lost or self._is_probe_due():
                        self._probe()
                        if time.monotonic() >= self._next_reconnect_s:
                            # It lives and nothing comes: the connection may be dead.
                            socket.disconnect(self.endpoint.telemetry)
                            socket.connect(self.endpoint.telemetry)
                            self._put_off_reconnecting()
        finally:
            socket.disable_monitor()
            socket.close()

    def _join(self, client: ControlClient) -> None:
        snapshot = self._snapshot(client)
        info = snapshot.info
        if info.schema_version > SCHEMA_VERSION:
            raise CommandRefused(
                "schema",
                f"the engine speaks schema {info.schema_version} (stepscope "
                f"{info.software_version}), this stepscope reads up to {SCHEMA_VERSION}: "
                "install a newer one",
            )
        known = self.history.info
        self._engine_id = info.engine_id
        self._last_published = None
        self._pending = None
        last_sequence = self.history.last_sequence
        if last_sequence is None:
            last_sequence = -1
        is_new = known is None or known.engine_id != info.engine_id
        if is_new or last_sequence > snapshot.sequence:
            if is_new and known is not None:
                self.history.append(snapshot.sequence, snapshot)
            else:  # nothing was known, or what was known cannot be of this engine
                self.history.reset(snapshot)
            self._send_on(snapshot)
            self._next_sequence = snapshot.sequence + 1
        else:
            self._next_sequence = last_sequence + 1
            self._pending = snapshot
            self._heal(client, snapshot.sequence + 1)
            self._next_sequence = snapshot.sequence + 1
            self._settle()
        self._heard()

    def _snapshot(self, client: ControlClient) -> Snapshot:
        """Ask for a snapshot. It is taken between two steps, and a step may be long."""
        client.info(ASK_AGAIN_S)  # is quick, and tells whether there is anybody at all
        now_s = next_ask_s = time.monotonic()
        deadline_s = now_s + SNAPSHOT_TIMEOUT_S
        wanted: set[int] = set()
        while (now_s := time.monotonic()) < deadline_s and not self._stopping.is_set():
            if now_s >= next_ask_s:
                wanted.add(client.send(GetSnapshot()))
                next_ask_s = now_s + SNAPSHOT_AGAIN_S
            received = client.receive(_POLL_MS / 1000)
            if received is None or received[0] not in wanted:
                continue
            reply = received[1]
            if isinstance(reply, Snapshot):
                return reply
            if isinstance(reply, Error):
                raise CommandRefused(reply.code, reply.message)
            raise CommandRefused(
                "protocol",
                f"{self.endpoint.control} answered with {type(reply).__name__}, expected Snapshot",
            )
        raise EngineUnreachable(
            f"{self.endpoint.control} gave no snapshot within {SNAPSHOT_TIMEOUT_S:g} s"
        )

    def _receive(self, socket: zmq.Socket[bytes], client: ControlClient) -> bool:
        """Take what is there; false where that was too much for one turn."""
        for _ in range(_BURST):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._take(frames, client)
        return False

    def _rest(
        self, disconnected: zmq.Poller, socket: zmq.Socket[bytes], client: ControlClient
    ) -> None:
        """Let messages gather. The last ones of an engine that dies meanwhile are taken."""
        start_s = time.monotonic()
        is_lost = disconnected.poll(_REST_MS)
        if is_lost and time.monotonic() - start_s < RECONNECT_MS / 1000:
            self._receive(socket, client)  # too soon for one that has come back in its place

    def _take(self, frames: list[bytes], client: ControlClient) -> None:
        """A message that came by itself."""
        try:
            topic, number, payload = frames
            sequence = wire.sequence_of(number)
            message = wire.decode(payload) if topic in _TOPICS else None
        except (ValueError, msgspec.DecodeError) as error:
            self._note_bad(error)
            return
        if self._doubt and client.info(ASK_AGAIN_S).engine_id != self._engine_id:
            raise _JoinAgain
        self._heard()
        if isinstance(message, EngineInfo) and message.engine_id != self._engine_id:
            raise _JoinAgain
        if self._last_published is not None and sequence <= self._last_published:
            raise _JoinAgain  # numbers only go back when an engine starts anew
        self._last_published = sequence
        if sequence > self._next_sequence:
            if client.info(ASK_AGAIN_S).engine_id != self._engine_id:
                raise _JoinAgain
            self._heal(client, sequence)
        self._accept(topic, sequence, message, payload)
        if self.history.needs_snapshot and self._pending is None:
            snapshot = self._snapshot(client)
            if snapshot.info.engine_id != self._engine_id:
                raise _JoinAgain  # it came while we asked, and counts anew
            self._pending = snapshot
            self._settle()

    def _heal(self, client: ControlClient, end: int) -> None:
        """Ask for the messages from the next one up to, not including, `end`."""
        while self._next_sequence < end:
            if self._stopping.is_set():
                raise _JoinAgain  # what has not come yet is not lost
            limit = min(self._replay_limit, end - self._next_sequence)
            try:
                replayed = self._replay(client, self._next_sequence, limit)
            except CommandRefused as error:
                if error.code == "rate_limited" and not self._stopping.wait(ASK_AGAIN_S):
                    continue
                log.warning("%s replays nothing: %s", self.endpoint.control, error)
                return
            before = self._next_sequence
            for frame in replayed.frames:
                if not self._next_sequence <= frame.sequence < end:
                    continue
                try:
                    known = frame.topic in _TOPICS
                    message = wire.decode(frame.payload) if known else None
                except msgspec.DecodeError as error:
                    self._note_bad(error)
                    continue
                self.num_healed += 1
                self._accept(frame.topic, frame.sequence, message, frame.payload)
            if self._next_sequence == before:
                return  # it does not have them any more

    def _replay(self, client: ControlClient, sequence: int, limit: int) -> Replayed:
        command = ReplayFrom(sequence=sequence, limit=limit)
        try:
            # Not again and again: each answer may be megabytes, on the same slow way.
            reply = client.ask(command, again_s=ASK_TIMEOUT_S / 2)
        except EngineUnreachable:
            self._replay_limit = max(_MIN_REPLAY, self._replay_limit // 4)
            raise
        self._replay_limit = min(_MAX_REPLAY, self._replay_limit * 2)
        if not isinstance(reply, Replayed):
            raise CommandRefused(
                "protocol",
                f"{self.endpoint.control} answered with {type(reply).__name__}, expected Replayed",
            )
        # It does not say of which engine: one that has come meanwhile counts anew.
        if client.info(ASK_AGAIN_S).engine_id != self._engine_id:
            raise _JoinAgain
        return reply

    def _accept(
        self, topic: bytes, sequence: int, message: wire.Telemetry | None, payload: bytes
    ) -> None:
        """Make a message part of the history, unless it is already."""
        if sequence < self._next_sequence:
            return
        if message is None:  # of a newer engine: a kind that we do not know
            self.history.skip(sequence)
        else:
            try:
                self.history.append(sequence, message, payload)
            except msgspec.DecodeError as error:
                self._note_bad(error)
                return
            self.tap.send(topic, sequence, payload)
        self._next_sequence = sequence + 1
        self._settle()

    def _settle(self) -> None:
        """Take over a snapshot that was asked for after a loss, at its place in the sequence."""
        pending = self._pending
        if pending is None or self._next_sequence <= pending.sequence:
            return
        self._pending = None
        self.history.append(pending.sequence, pending)
        self._send_on(pending)

    def _send_on(self, snapshot: Snapshot) -> None:
        self.tap.send(_KEYFRAME, snapshot.sequence, wire.encode(snapshot))

    def _is_probe_due(self) -> bool:
        now_s = time.monotonic()
        return now_s - self._last_heard_s > self._stale_s and now_s >= self._next_probe_s

    def _probe(self) -> None:
        """Nothing has come for a while, or the connection is lost: is anybody there?"""
        self._doubt = True
        silent_s = time.monotonic() - self._last_heard_s
        try:
            # A client of its own: what was asked of a dead engine must not reach its successor.
            with ControlClient(self.endpoint, RETRY_S) as client:
                if client.info().engine_id != self._engine_id:
                    raise _JoinAgain
        except (EngineUnreachable, CommandRefused) as error:
            self._status = "starting" if isinstance(error, EngineStarting) else "down"
            self._error = str(error)
        else:
            if silent_s <= self._stale_s:
                return  # only the connection was lost
            self._status = "stale"
            self._error = f"the engine answers, but nothing came from it for {silent_s:.0f} s"
        self._next_probe_s = time.monotonic() + self._retry_s

    def _heard(self) -> None:
        self._last_heard_s = time.monotonic()
        self._put_off_reconnecting()
        self._doubt = False
        self._status = "live"
        self._error = None

    def _put_off_reconnecting(self) -> None:
        self._next_reconnect_s = time.monotonic() + _DEAD_AFTER * self._stale_s

    def _note_bad(self, error: Exception) -> None:
        self.num_bad += 1
        self._bad = f"{self.num_bad:,} messages could not be read, the last one: {error}"
