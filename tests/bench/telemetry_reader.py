"""A subscriber that only counts messages: telemetry is on its way while an engine is measured."""

import zmq

from stepscope.engine.protocol.wire import sequence_of
from stepscope.engine.transport.sockets import client_socket


class TelemetryReader:
    def __init__(self, address: str) -> None:
        self.num_received = 0
        self.num_gaps = 0
        self._last_sequence: int | None = None
        self._socket = client_socket(zmq.SUB, None)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def drain(self) -> None:
        while self._socket.poll(0):
            sequence = sequence_of(self._socket.recv_multipart()[1])
            if self._last_sequence is not None:
                self.num_gaps += sequence - self._last_sequence - 1
            self._last_sequence = sequence
            self.num_received += 1

    def close(self) -> None:
        self._socket.close(linger=0)
