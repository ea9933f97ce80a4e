"""`TelemetryFollower`: the engine's telemetry on an asyncio loop, for the metrics.

It subscribes first and asks for a snapshot then, so that nothing falls between the two. Messages
that are missing are asked for again; what the engine does not have any more is counted as lost.
"""

import asyncio
import logging
from collections import deque
from typing import NamedTuple

import msgspec
import zmq

from stepscope.engine import wire
from stepscope.engine.access.sockets import client_socket
from stepscope.engine.client import CommandRefused, EngineUnreachable
from stepscope.engine.commands import GetSnapshot, Replayed, ReplayFrom
from stepscope.engine.http.engine_client import EngineClient
from stepscope.engine.http.metrics import EngineMetrics
from stepscope.engine.http.sockets import SocketReader
from stepscope.engine.wire import Snapshot, Telemetry

log = logging.getLogger("stepscope.http")

SNAPSHOT_S = 60.0
REPLAY_S = 5.0
RECEIVE_QUEUE = 50_000
_MAX_REPLAY = 1_000
_TOPICS = frozenset(wire.TOPICS.values())


class _Message(NamedTuple):
    sequence: int
    message: Telemetry | None  # None: of a kind that we do not know


class TelemetryFollower:
    """Feeds `metrics` from the engine that `engine` is connected to."""

    def __init__(self, engine: EngineClient, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._next_sequence: int | None = None  # None: a snapshot is needed first
        self._held: deque[_Message] = deque()  # came out of order, or before the snapshot
        self._catching_up = False
        self._wanted = asyncio.Event()  # something is held that cannot be applied as it is

    async def run(self) -> None:
        """Follow one engine, from when it was found until cancelled."""
        socket = client_socket(zmq.SUB, self._engine.endpoint)
        socket.linger = 0
        socket.rcvhwm = RECEIVE_QUEUE
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
        reader = SocketReader(socket, self._take)
        try:
            socket.connect(self._engine.endpoint.telemetry)
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
            self._metrics.leave()
            reader.close()
            socket.close()

    def _take(self, frames: list[bytes]) -> None:
        try:
            topic, number, payload = frames
            message = _decoded(topic, payload)
            received = _Message(wire.sequence_of(number), message)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("the engine published what is no message: %s", error)
            return
        if self._catching_up or received.sequence != self._next_sequence:
            self._held.append(received)
            self._wanted.set()
        else:
            self._apply(received)

    async def _catch_up(self) -> None:
        """Until all that is held is applied.

        Raises:
            EngineUnreachable, CommandRefused: the engine did not tell what is missing.
        """
        if self._next_sequence is None:
            snapshot = await self._engine.ask_for(Snapshot, GetSnapshot(), SNAPSHOT_S)
            self._metrics.join(snapshot)
            self._next_sequence = snapshot.sequence + 1
        while self._held:
            received = self._held[0]
            if received.sequence > self._next_sequence:
                await self._heal(received.sequence)
            if received.sequence == self._next_sequence:
                self._apply(received)
            self._held.popleft()

    async def _heal(self, end: int) -> None:
        """Ask for the messages from the next one up to, not including, `end`."""
        assert self._next_sequence is not None
        while self._next_sequence < end:
            limit = min(_MAX_REPLAY, end - self._next_sequence)
            command = ReplayFrom(sequence=self._next_sequence, limit=limit)
            replayed = await self._engine.ask_for(Replayed, command, REPLAY_S)
            frames = [frame for frame in replayed.frames if frame.sequence < end]
            if not frames or frames[0].sequence > self._next_sequence:
                break
            for frame in frames:
                self._metrics.num_healed_messages += 1
                self._apply(_Message(frame.sequence, _decoded(frame.topic, frame.payload)))
        if self._next_sequence < end:
            num_lost = end - self._next_sequence
            log.warning("%d messages of the engine are lost to the metrics", num_lost)
            self._metrics.lose(num_lost)
            self._next_sequence = end

    def _apply(self, received: _Message) -> None:
        self._next_sequence = received.sequence + 1
        if received.message is not None:
            self._metrics.apply(received.message)


def _decoded(topic: bytes, payload: bytes) -> Telemetry | None:
    return wire.decode(payload) if topic in _TOPICS else None
