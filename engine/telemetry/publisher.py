"""`Publisher`: numbers, keeps and sends the engine's messages.

Belongs to the engine's thread, except for `publish_aside` and `replay`. Sending never waits: a
subscriber whose queue is full misses the message, and asks for it later. The answer comes from the
kept messages (`Publisher.replay`).
"""

import zmq

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.replies import Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.telemetry.sender import Sender, open_sender
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.sockets import bind, server_socket

MAX_SUBSCRIPTION_BYTES = 1_024
SUBSCRIBER_QUEUE = 10_000  # messages per subscriber before it misses some
RING_BYTES = 256 * 1024 * 1024
MAX_REPLAY_BYTES = 256 * 1024  # in one answer; the client asks again for more


class Publisher:
    """The PUB socket of an engine, and the last messages that it sent.

    `num_dropped`: messages that at least one subscriber missed, as known when the last message was
    published; `sender.num_dropped` is the current number.

    Args:
        address: ZeroMQ address to bind; None to number and keep messages without sending them.
        ring_bytes: bytes kept for `replay`, at most; the newest message is kept whatever its size.
    """

    def __init__(
        self,
        address: str | None,
        ring_size: int,
        ring_bytes: int = RING_BYTES,
        gate: Gate | None = None,
    ) -> None:
        self._payload = bytearray()  # holds one message at a time, always in the same memory
        self._gate = gate
        self._socket = None if address is None else _publishing_socket(address, gate)
        self.num_dropped = 0
        self.sender: Sender = open_sender(self._socket, ring_size, ring_bytes, gate is not None)

    @property
    def next_sequence(self) -> int:
        return self.sender.next_sequence

    def publish(self, message: Telemetry) -> None:
        sender, payload = self.sender, self._payload
        wire.encode_into(message, payload)
        while self._gate is not None and (subscription := sender.take_subscription()) is not None:
            public, descriptor = subscription
            self._gate.note(descriptor, public)
        self.num_dropped = sender.add(message.topic, payload)

    def publish_aside(self, message: Telemetry) -> None:
        """Number, keep and send one message, from a thread other than the engine's."""
        self.sender.add(message.topic, bytearray(wire.encode(message)))

    def replay(self, sequence: int, limit: int) -> Replayed:
        """Return up to `limit` kept messages from number `sequence` on. From any thread."""
        sender = self.sender
        end = sender.next_sequence
        first = max(sequence, sender.oldest_sequence)
        frames: list[ReplayedFrame] = []
        num_bytes = 0
        for number in range(first, min(end, first + limit)):
            kept = sender.get(number)
            if kept is None:
                continue  # dropped from the ring while we were reading
            _, topic, payload = kept
            num_bytes += len(payload)
            if frames and num_bytes > MAX_REPLAY_BYTES:
                break
            frames.append(ReplayedFrame(topic, number, payload))
        # `oldest_sequence` is read last: it tells the client which messages were dropped meanwhile.
        return Replayed(frames=frames, oldest_sequence=sender.oldest_sequence, next_sequence=end)

    def close(self) -> None:
        """Send the remaining messages, as far as subscribers take them, and close the socket."""
        self.sender.stop()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _publishing_socket(address: str, gate: Gate | None) -> "zmq.Socket[bytes]":
    # Only XPUB shows who has subscribed.
    socket = server_socket(zmq.PUB if gate is None else zmq.XPUB, gate)
    if gate is not None:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    bind(socket, address)
    return socket
