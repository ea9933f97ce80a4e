"""`Publisher`: numbers, keeps and sends what the engine tells. Belongs to the engine's thread.

Sending never waits: a subscriber whose queue is full misses the message and asks for it again from
the replay ring (`Publisher.replay`, safe to call from another thread).
"""

from typing import NamedTuple

import zmq

from stepscope.engine import wire
from stepscope.engine.commands import Replayed, ReplayedFrame
from stepscope.engine.wire import TOPICS, Telemetry

SUBSCRIBER_QUEUE = 10_000  # messages per subscriber before it misses some
MAX_REPLAY_BYTES = 4 * 1024 * 1024  # of one answer; the asker comes again for more


class _Kept(NamedTuple):
    sequence: int
    topic: bytes
    payload: bytes


class Publisher:
    """PUB socket and replay ring.

    Args:
        address: ZeroMQ address to bind, None to number and keep only.
        ring_size: messages kept for `replay`.
    """

    def __init__(self, address: str | None, ring_size: int) -> None:
        self.next_sequence = 0
        self.num_dropped = 0  # messages that at least one subscriber missed
        # One writer; a reader checks the number it finds, so no lock is needed.
        self._ring: list[_Kept | None] = [None] * ring_size
        self._socket: zmq.Socket[bytes] | None = None
        if address is not None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
            socket.bind(address)
            self._socket = socket

    def publish(self, message: Telemetry) -> None:
        """Number, keep and send one message."""
        sequence = self.next_sequence
        kept = _Kept(sequence, TOPICS[type(message)], wire.encode(message))
        self._ring[sequence % len(self._ring)] = kept
        self.next_sequence = sequence + 1
        if self._socket is None:
            return
        frames = [kept.topic, wire.sequence_frame(sequence), kept.payload]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # NODROP makes a full queue visible, so that it can be counted; the other subscribers
            # are not to miss the message for it.
            self.num_dropped += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)

    def replay(self, sequence: int, limit: int) -> Replayed:
        """Up to `limit` messages from `sequence` on, oldest first, as far as they are kept."""
        end = self.next_sequence
        oldest = max(0, end - len(self._ring))
        frames: list[ReplayedFrame] = []
        num_bytes = 0
        for number in range(max(sequence, oldest), min(end, max(sequence, oldest) + limit)):
            kept = self._ring[number % len(self._ring)]
            if kept is None or kept.sequence != number:
                continue  # overwritten while we were reading
            num_bytes += len(kept.payload)
            if frames and num_bytes > MAX_REPLAY_BYTES:
                break
            frames.append(ReplayedFrame(kept.topic, kept.sequence, kept.payload))
        return Replayed(frames=frames, oldest_sequence=oldest, next_sequence=end)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
