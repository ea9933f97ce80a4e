"""`Publisher`: numbers, keeps and sends what the engine tells. Belongs to the engine's thread.

Sending never waits: a subscriber whose queue is full misses the message and asks for it again from
the replay ring (`Publisher.replay`, safe to call from another thread).
"""

from typing import NamedTuple

import zmq

from stepscope.engine import wire
from stepscope.engine.access.gate import Gate
from stepscope.engine.access.sockets import bind, server_socket
from stepscope.engine.commands import Replayed, ReplayedFrame
from stepscope.engine.wire import TOPICS, Telemetry

MAX_SUBSCRIPTION_BYTES = 1_024
SUBSCRIBER_QUEUE = 10_000  # messages per subscriber before it misses some
RING_BYTES = 256 * 1024 * 1024
MAX_REPLAY_BYTES = 4 * 1024 * 1024  # of one answer; the asker comes again for more
_FIRST = zmq.NOBLOCK | zmq.SNDMORE


class _Kept(NamedTuple):
    sequence: int
    topic: bytes
    payload: bytes


class Publisher:
    """PUB socket and replay ring.

    Args:
        address: ZeroMQ address to bind, None to number and keep only.
        ring_size: messages kept for `replay` at most, ...
        ring_bytes: ... and bytes of them; the newest message is kept however large it is.
        gate: who may subscribe; None: everybody who can reach the address.
    """

    def __init__(
        self,
        address: str | None,
        ring_size: int,
        ring_bytes: int = RING_BYTES,
        gate: Gate | None = None,
    ) -> None:
        self.next_sequence = 0
        self.num_dropped = 0  # messages that at least one subscriber missed
        self.num_ring_bytes = 0
        self._ring_bytes = ring_bytes
        # One writer; a reader checks the number it finds, so no lock is needed.
        self._ring: list[_Kept | None] = [None] * ring_size
        self.oldest_sequence = 0  # the first message that can be replayed
        self._gate = gate
        self._socket: zmq.Socket[bytes] | None = None
        if address is not None:
            # Only XPUB tells who has subscribed.
            socket = server_socket(zmq.PUB if gate is None else zmq.XPUB, gate)
            if gate is not None:
                socket.setsockopt(zmq.XPUB_VERBOSE, 1)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
            bind(socket, address)
            self._socket = socket

    def publish(self, message: Telemetry) -> None:
        """Number, keep and send one message."""
        sequence = self.next_sequence
        topic, payload = TOPICS[type(message)], wire.encode(message)
        self._keep(_Kept(sequence, topic, payload))
        socket = self._socket
        if socket is None:
            return
        if self._gate is not None:
            self._gate.note_subscribers(socket)
        number = wire.sequence_frame(sequence)
        try:
            socket.send(topic, _FIRST)
        except zmq.Again:
            # NODROP makes a full queue visible, so that it can be counted; the other subscribers
            # are not to miss the message for it.
            self.num_dropped += 1
            socket.setsockopt(zmq.XPUB_NODROP, 0)
            socket.send_multipart((topic, number, payload), zmq.NOBLOCK)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
        else:
            # A message that was begun has room for all of it.
            socket.send(number, _FIRST)
            socket.send(payload, zmq.NOBLOCK)

    def _keep(self, kept: _Kept) -> None:
        ring = self._ring
        self.num_ring_bytes += len(kept.payload)
        # Given up before it is overwritten: a reader is never told of what is not there any more.
        while self.oldest_sequence < kept.sequence and (
            kept.sequence - self.oldest_sequence >= len(ring)
            or self.num_ring_bytes > self._ring_bytes
        ):
            place = self.oldest_sequence % len(ring)
            oldest = ring[place]
            assert oldest is not None
            self.oldest_sequence += 1
            self.num_ring_bytes -= len(oldest.payload)
            ring[place] = None
        ring[kept.sequence % len(ring)] = kept
        self.next_sequence = kept.sequence + 1

    def replay(self, sequence: int, limit: int) -> Replayed:
        """Up to `limit` messages from `sequence` on, oldest first, as far as they are kept."""
        end = self.next_sequence
        oldest = self.oldest_sequence
        frames: list[ReplayedFrame] = []
        num_bytes = 0
        for number in range(max(sequence, oldest), min(end, max(sequence, oldest) + limit)):
            kept = self._ring[number % len(self._ring)]
            if kept is None or kept.sequence != number:
                continue  # given up while we were reading
            num_bytes += len(kept.payload)
            if frames and num_bytes > MAX_REPLAY_BYTES:
                break
            frames.append(ReplayedFrame(kept.topic, kept.sequence, kept.payload))
        # What was given up meanwhile is not among the frames: it is not there any more.
        return Replayed(frames=frames, oldest_sequence=self.oldest_sequence, next_sequence=end)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
