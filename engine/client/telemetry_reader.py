"""`TelemetryReader`: a subscriber that only counts messages, to check that telemetry arrives."""

import time

import zmq

from stepscope.engine.protocol.wire import sequence_of
from stepscope.engine.transport.sockets import client_socket


class TelemetryReader:
    """Counts messages and gaps. It has no thread.

    ZeroMQ queues the messages, and `drain` empties the queue.
    """

    def __init__(self, address: str) -> None:
        self.num_received = 0
        self.num_gaps = 0
        self.last_sequence: int | None = None
        self._socket = client_socket(zmq.SUB, None)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def drain(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sequence = sequence_of(frames[1])
            if self.last_sequence is not None:
                self.num_gaps += sequence - self.last_sequence - 1
            self.last_sequence = sequence
            self.num_received += 1

    def drain_until(self, sequence: int, timeout_s: float) -> None:
        """Count messages until message `sequence` has arrived or time is up.

        Messages that are then still missing count as gaps.
        """
        deadline_s = time.monotonic() + timeout_s
        self.drain()
        while (self.last_sequence or 0) < sequence and time.monotonic() < deadline_s:
            self._socket.poll(20)
            self.drain()
        if self.last_sequence is not None:
            self.num_gaps += max(0, sequence - self.last_sequence)

    def close(self) -> None:
        self._socket.close(linger=0)
