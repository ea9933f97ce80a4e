"""`TelemetryFollower`: subscribes to the engine's telemetry on an asyncio loop, for the metrics.

It first subscribes and then asks for a snapshot, so that no message is lost between the two. A
message that never comes counts as lost: this process reads all the time, and the queues between it
and the engine hold minutes.
"""

import asyncio
import logging

import msgspec
import zmq

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http.engine_client import EngineClient, SocketReader
from stepscope.engine.http.metrics.reducer import EngineMetrics
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import GetSnapshot
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.transport.sockets import client_socket

log = logging.getLogger("stepscope.http")

SNAPSHOT_S = 60.0
RETRY_S = 1.0
RECEIVE_QUEUE = 50_000
_TOPICS = frozenset(wire.TOPICS.values())


class TelemetryFollower:
    """Updates `metrics` from the telemetry of the engine that `engine` is connected to."""

    def __init__(self, engine: EngineClient, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._next_sequence: int | None = None  # None: the snapshot has not come
        self._early: list[list[bytes]] = []  # messages that came before the snapshot

    async def run(self) -> None:
        """Follow the telemetry of the engine that is connected now, until cancelled."""
        socket = client_socket(zmq.SUB, self._engine.endpoint)
        socket.rcvhwm = RECEIVE_QUEUE
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
        reader = SocketReader(socket, self.receive)
        try:
            socket.connect(self._engine.endpoint.here.telemetry)
            socket.subscribe(b"")
            self.join(await self._snapshot())
            await asyncio.Event().wait()
        finally:
            reader.close()
            if self._next_sequence is not None:
                self._drain(socket)
            self._metrics.leave()
            socket.close()

    def join(self, snapshot: Snapshot) -> None:
        """Begin with a snapshot, and the messages that came while it was made."""
        self._metrics.join(snapshot)
        self._next_sequence = snapshot.sequence + 1
        early, self._early = self._early, []
        for frames in early:
            self.receive(frames)

    def receive(self, frames: list[bytes]) -> None:
        """Apply a message; those skipped before it count as lost."""
        if self._next_sequence is None:
            self._early.append(frames)
            return
        try:
            topic, number, payload = frames
            sequence = wire.sequence_of(number)
            message = wire.decode(payload) if topic in _TOPICS else None
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("the engine published what is no message: %s", error)
            return
        num_lost = sequence - self._next_sequence
        if num_lost < 0:
            return  # the snapshot includes it
        if num_lost:
            log.warning("%d messages of the engine are lost to the metrics", num_lost)
            self._metrics.lose(num_lost)
        self._next_sequence = sequence + 1
        if message is not None:
            self._metrics.apply(message)

    async def _snapshot(self) -> Snapshot:
        while True:
            try:
                return await self._engine.ask_for(Snapshot, GetSnapshot(), SNAPSHOT_S)
            except (EngineUnreachable, CommandRefused) as error:
                log.warning("the metrics wait for the engine: %s", error)
                await asyncio.sleep(RETRY_S)

    def _drain(self, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(RECEIVE_QUEUE):
            try:
                self.receive(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
