"""`Subscriber`: the live source. Its thread owns the SUB socket and the control client.

The thread joins an engine: it subscribes first and then asks for a snapshot, so that no message is
lost between the two. Missing messages are asked for; those that the engine no longer keeps count as
lost. When an engine comes back after a silence, the thread joins it again. The engine id tells
whether it is still the same engine.
"""

import logging
import threading
import time

import msgspec
import zmq

from stepscope.engine.client.client import (
    CommandRefused,
    ControlClient,
    EngineSilent,
    EngineStarting,
    EngineUnreachable,
)
from stepscope.engine.client.reorder_buffer import Received
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import SCHEMA_VERSION, EngineInfo
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.sockets import RECONNECT_MS, client_socket
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, SourceStatus
from stepscope.recordings.live.gap_recovery import ASK_TIMEOUT_S, TOPICS, GapRecovery, JoinAgain

log = logging.getLogger("stepscope.recordings")

STALE_S = 3.0  # an engine sends a status at least every second
RETRY_S = 1.0
RECEIVE_QUEUE = 50_000  # messages waiting in the socket
_DEAD_AFTER = 2.0  # times `stale_s`
_POLL_MS = 50
_BURST = 2_000  # messages taken before it checks whether to stop
_REST_MS = 50  # let messages gather, as a wake-up costs more than a message


class Subscriber:
    """Fills `history` from a running engine; implements `Source`.

    Args:
        stale_s: seconds without any message until the status is `stale`.
        retry_s: seconds between attempts to reach an engine that does not answer.
        past_s: seconds before the join at which the history begins, as far as the engine keeps it.
    """

    is_live = True

    def __init__(
        self,
        endpoint: Endpoint | str,
        history: History | None = None,
        stale_s: float = STALE_S,
        retry_s: float = RETRY_S,
        past_s: float = 0.0,
    ) -> None:
        self.endpoint = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.name = self.endpoint.name
        self.history = history if history is not None else History()
        self.tap = FrameTap()
        self._stale_s = stale_s
        self._retry_s = retry_s
        self.status: SourceStatus = "connecting"
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)
        self._recovery = GapRecovery(self.history, self.tap, self._stopping, past_s)
        # Of the joined engine:
        self._last_published: int | None = None  # the last live message
        self._last_heard_s = 0.0
        self._next_probe_s = 0.0
        self._next_reconnect_s = 0.0
        self._doubt = False  # after a silence: another engine may answer now

    @property
    def error(self) -> str | None:
        return self._error or self._recovery.bad

    @property
    def num_bad(self) -> int:
        return self._recovery.num_bad

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
            except JoinAgain:
                continue
            except (EngineUnreachable, CommandRefused) as error:
                self._note_down(error)
            except Exception as error:
                # This is a bug of ours, which must not lose the session on the screen.
                log.exception("the subscriber of %s failed and joins again", self.endpoint.control)
                self.status = "down"
                self._error = f"internal error, see the log: {error!r}"
            self._stopping.wait(self._retry_s)
        self._recovery.end()

    def _follow(self) -> None:
        """Join the engine and receive messages until an error occurs or `stop` is called."""
        socket = client_socket(zmq.SUB, self.endpoint)
        # A replacement engine may continue with exactly the expected number. Then only the lost
        # connection reveals it.
        disconnected = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(disconnected, zmq.POLLIN)
        try:
            socket.linger = 0
            socket.rcvhwm = RECEIVE_QUEUE
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
            # No heartbeats: libzmq 4.3 aborts the process when one is due on a connection that was
            # lost while the receive queue was full. The engine's own signs of life serve as well.
            socket.connect(self.endpoint.here.telemetry)
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
                            self._rest(disconnected, socket, client)
                    elif is_lost or self._is_probe_due():
                        self._probe()
                        if (now_s := time.monotonic()) >= self._next_reconnect_s:
                            # The engine answers but publishes nothing: the connection may be dead.
                            socket.disconnect(self.endpoint.here.telemetry)
                            socket.connect(self.endpoint.here.telemetry)
                            self._next_reconnect_s = now_s + _DEAD_AFTER * self._stale_s
                for _ in range(RECEIVE_QUEUE // _BURST):  # bounded: an engine may send without end
                    if self._receive(socket, client):
                        break
        finally:
            socket.disable_monitor()
            socket.close()

    def _join(self, client: ControlClient) -> None:
        snapshot = self._recovery.snapshot(client)
        info = snapshot.info
        if info.schema_version > SCHEMA_VERSION:
            raise CommandRefused(
                "schema",
                f"the engine speaks schema {info.schema_version} (stepscope "
                f"{info.software_version}), this stepscope reads up to {SCHEMA_VERSION}: "
                "install a newer one",
            )
        self._last_published = None
        self._recovery.join(client, snapshot)
        self._heard()

    def _receive(self, socket: zmq.Socket[bytes], client: ControlClient) -> bool:
        """Receive waiting messages, so that one question covers all gaps; False: too many."""
        batch: list[Received] = []
        is_all = is_of_another = False
        for _ in range(_BURST):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                is_all = True
                break
            if (received := self._read(frames)) is None:
                continue
            if is_of_another := self._is_of_another(received):
                break
            batch.append(received)
            self._last_published = received.sequence
        if batch:
            if self._doubt:
                self._recovery.check(client)
            self._heard()
            self._recovery.receive(client, batch)
        if is_of_another:
            raise JoinAgain
        return is_all

    def _rest(
        self, disconnected: zmq.Socket[bytes], socket: zmq.Socket[bytes], client: ControlClient
    ) -> None:
        """Wait some milliseconds for more messages, or for the last ones of a lost connection."""
        start_s = time.monotonic()
        is_lost = disconnected.poll(_REST_MS)
        if is_lost and time.monotonic() - start_s < RECONNECT_MS / 1000:
            self._receive(socket, client)  # a replacement engine cannot have sent any yet

    def _read(self, frames: list[bytes]) -> Received | None:
        try:
            topic, number, payload = frames
            sequence = wire.sequence_of(number)
            message = wire.decode(payload) if topic in TOPICS else None
        except (ValueError, msgspec.DecodeError) as error:
            self._recovery.note_bad(error)
            return None
        return Received(sequence, topic, payload, message)

    def _is_of_another(self, received: Received) -> bool:
        """Whether the message must come from another engine: another id, or a number gone back."""
        message = received.message
        if isinstance(message, EngineInfo) and not self._recovery.is_of(message.engine_id):
            return True
        # Numbers only go back when an engine restarts.
        return self._last_published is not None and received.sequence <= self._last_published

    def _is_probe_due(self) -> bool:
        now_s = time.monotonic()
        return now_s - self._last_heard_s > self._stale_s and now_s >= self._next_probe_s

    def _probe(self) -> None:
        """Check whether the engine still answers, after a silence or a lost connection."""
        self._doubt = True
        silent_s = time.monotonic() - self._last_heard_s
        try:
            # A new client: a question for the dead engine must not reach its successor.
            with ControlClient(self.endpoint, RETRY_S) as client:
                if not self._recovery.is_of(client.info().engine_id):
                    raise JoinAgain
        except (EngineUnreachable, CommandRefused) as error:
            self._note_down(error)
        else:
            if silent_s <= self._stale_s:
                return  # only the connection was lost
            self.status = "stale"
            self._error = f"the engine answers, but nothing came from it for {silent_s:.0f} s"
        self._next_probe_s = time.monotonic() + self._retry_s

    def _note_down(self, error: Exception) -> None:
        if isinstance(error, EngineStarting):
            self.status = "starting"
        elif self.status != "connecting":
            self.status = "down"
        text, info = str(error), self.history.info
        if self.status != "starting" and info is not None and not text.startswith(f"{info.name} "):
            text = f"{info.name} is down: {text}"
            if isinstance(error, EngineSilent):
                where = self.endpoint.control
                text = f"{info.name} answers nothing: stopped or cut off (at {where})"
        self._error = text

    def _heard(self) -> None:
        self._last_heard_s = now_s = time.monotonic()
        self._next_reconnect_s = now_s + _DEAD_AFTER * self._stale_s
        self._doubt = False
        self.status = "live"
        self._error = None
