"""`TelemetryFollower`: subscribes to the engine's telemetry on an asyncio loop, for the metrics.

It first subscribes and then asks for a snapshot, so that no message is lost between the two. After
a gap it asks the engine to send missing messages again, and one question covers all gaps. Messages
that the engine no longer has count as lost.
"""

import asyncio
import logging

import msgspec
import zmq

from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.client.telemetry_reader import Received, ReorderBuffer
from stepscope.engine.http.engine_client import EngineClient, SocketReader
from stepscope.engine.http.metrics.reducer import EngineMetrics
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Replayed
from stepscope.engine.protocol.wire import Snapshot, Telemetry
from stepscope.engine.transport.sockets import client_socket

log = logging.getLogger("stepscope.http")

SNAPSHOT_S = 60.0
REPLAY_S = 5.0
RECEIVE_QUEUE = 50_000
_MAX_REPLAY = 1_000
_REST_S = 0.1  # pause between two questions, so that one question covers several gaps
_TOPICS = frozenset(wire.TOPICS.values())


class TelemetryFollower:
    """Updates `metrics` from the telemetry of the engine that `engine` is connected to."""

    def __init__(self, engine: EngineClient, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._next_sequence: int | None = None  # None: a snapshot is needed first
        self._held = ReorderBuffer()  # messages after a gap, or from before the snapshot
        self._next_ask_s = 0.0
        self._catching_up = False
        self._num_lost = 0  # messages, so far
        self._wanted = asyncio.Event()  # set when a held message needs `_catch_up`

    async def run(self) -> None:
        """Follow the telemetry of the engine that is connected now, until cancelled."""
        socket = client_socket(zmq.SUB, self._engine.endpoint)
        socket.linger = 0
        socket.rcvhwm = RECEIVE_QUEUE
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
        reader = SocketReader(socket, self._receive)
        try:
            socket.connect(self._engine.endpoint.here.telemetry)
            socket.subscribe(b"")
            self._next_sequence = None
            self._held.clear()
            while True:
                self._catching_up = True
                try:
                    await self._catch_up()
                except (EngineUnreachable, CommandRefused) as error:
                    log.warning("the metrics wait for the engine: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                self._catching_up = False
                self._wanted.clear()
                await self._wanted.wait()
        finally:
            reader.close()
            self._finish(socket)
            self._metrics.leave()
            socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            topic, number, payload = frames
            sequence = wire.sequence_of(number)
            received = Received(sequence, topic, payload, _decoded(topic, payload))
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("the engine published what is no message: %s", error)
            return
        if self._catching_up or received.sequence != self._next_sequence:
            self._held.add(received)
            self._wanted.set()
        else:
            self._apply(received.sequence, received.message)

    async def _catch_up(self) -> None:
        """Get a snapshot if needed, then fill gaps until all held messages are applied."""
        if self._next_sequence is None:
            snapshot = await self._engine.ask_for(Snapshot, GetSnapshot(), SNAPSHOT_S)
            self._metrics.join(snapshot)
            self._next_sequence = snapshot.sequence + 1
        while self._held:
            if self._held.oldest <= self._next_sequence:
                received = self._held.pop()
                self._apply(received.sequence, received.message)
            else:
                await self._heal()

    async def _heal(self) -> None:
        """Ask the engine for the messages missing before the newest held one."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_ask_s - loop.time())
        self._next_ask_s = loop.time() + _REST_S
        assert self._next_sequence is not None
        first, end = self._next_sequence, self._held.newest + 1
        num_missing = self._held.num_to_ask(first, end, _MAX_REPLAY)
        command = ReplayFrom(sequence=first, limit=num_missing)
        answer = await self._engine.ask_for(Replayed, command, REPLAY_S)
        self._go_on(first, num_missing, end, answer)

    def _go_on(self, first: int, num_asked: int, end: int, answer: Replayed | None) -> None:
        """Apply the messages that can now be processed in order, and count those lost for good."""
        num_lost_before = self._num_lost
        settled, reach = self._held.settle(first, num_asked, end, answer)
        for each in settled:
            if isinstance(each, Received):
                self._apply(each.sequence, each.message)
                continue
            try:
                message = _decoded(each.topic, each.payload)
            except msgspec.DecodeError as error:
                log.warning("the engine replayed what is no message: %s", error)
                continue
            self._metrics.meters.count("stepscope_telemetry_healed")
            self._apply(each.sequence, message)
        self._lose_up_to(reach)
        if num_lost := self._num_lost - num_lost_before:
            log.warning("%d messages of the engine are lost to the metrics", num_lost)

    def _finish(self, socket: "zmq.Socket[bytes]") -> None:
        """Apply the messages that have arrived, without asking for missing ones."""
        if self._next_sequence is None:
            return
        self._catching_up = True
        for _ in range(RECEIVE_QUEUE):
            try:
                self._receive(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        if self._held:
            self._go_on(self._next_sequence, 0, self._held.newest + 1, None)

    def _apply(self, sequence: int, message: Telemetry | None) -> None:
        """Apply a message (None: of an unknown kind); those skipped before it count as lost."""
        assert self._next_sequence is not None
        if sequence < self._next_sequence:
            return
        self._lose_up_to(sequence)
        self._next_sequence = sequence + 1
        if message is not None:
            self._metrics.apply(message)

    def _lose_up_to(self, sequence: int) -> None:
        assert self._next_sequence is not None
        if (num_lost := sequence - self._next_sequence) > 0:
            self._metrics.lose(num_lost)
            self._num_lost += num_lost
            self._next_sequence = sequence


def _decoded(topic: bytes, payload: bytes) -> Telemetry | None:
    return wire.decode(payload) if topic in _TOPICS else None
