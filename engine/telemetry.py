"""`Publisher`: numbers, keeps and sends what the engine tells. Belongs to the engine's thread.

Sending never waits: a subscriber whose queue is full misses the message and asks for it again from
the replay ring (`Publisher.replay`, safe to call from another thread).
"""

import zmq

from stepscope.engine import wire
from stepscope.engine.access.gate import Gate
from stepscope.engine.access.sockets import bind, server_socket
from stepscope.engine.commands import Replayed, ReplayedFrame
from stepscope.engine.replay_ring import ReplayRing
from stepscope.engine.wire import TOPICS, Telemetry

MAX_SUBSCRIPTION_BYTES = 1_024
SUBSCRIBER_QUEUE = 10_000  # messages per subscriber before it misses some
RING_BYTES = 256 * 1024 * 1024
MAX_REPLAY_BYTES = 4 * 1024 * 1024  # of one answer; the asker comes again for more
_FIRST = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
# Without the layer of pyzmq that looks for options we do not use: this is part of every step.
_send = zmq.backend.Socket.send


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
        self.ring = ReplayRing(ring_size, ring_bytes)
        self._payload = bytearray()  # made anew for each message, in the same memory
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
        topic, payload = TOPICS[type(message)], self._payload
        wire.encode_into(message, payload)
        self.ring.add(topic, payload)
        self.next_sequence = sequence + 1
        socket = self._socket
        if socket is None:
            return
        if self._gate is not None:
            self._gate.note_subscribers(socket)
        number = wire.sequence_frame(sequence)
        try:
            _send(socket, topic, _FIRST)
        except zmq.Again:
            # NODROP makes a full queue visible, so that it can be counted; the other subscribers
            # are not to miss the message for it.
            self.num_dropped += 1
            socket.setsockopt(zmq.XPUB_NODROP, 0)
            socket.send_multipart((topic, number, payload), zmq.NOBLOCK)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
        else:
            # A message that was begun has room for all of it.
            _send(socket, number, _FIRST)
            _send(socket, payload, _LAST)

    def replay(self, sequence: int, limit: int) -> Replayed:
        """Up to `limit` messages from `sequence` on, oldest first, as far as they are kept."""
        ring = self.ring
        end = ring.next_sequence
        first = max(sequence, ring.oldest_sequence)
        frames: list[ReplayedFrame] = []
        num_bytes = 0
        for number in range(first, min(end, first + limit)):
            kept = ring.get(number)
            if kept is None:
                continue  # given up while we were reading
            num_bytes += len(kept.payload)
            if frames and num_bytes > MAX_REPLAY_BYTES:
                break
            frames.append(ReplayedFrame(kept.topic, kept.sequence, kept.payload))
        # What was given up meanwhile is not among the frames: it is not there any more.
        return Replayed(frames=frames, oldest_sequence=ring.oldest_sequence, next_sequence=end)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
