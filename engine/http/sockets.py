"""`SocketReader`: reads a ZeroMQ socket on an asyncio loop, several messages at a time.

zmq.asyncio creates two futures per message. With one message per token, that would be most of the
process's work. So this class watches the socket's file descriptor itself, and reads all waiting
messages at once.
"""

import asyncio
from collections.abc import Callable

import zmq

_BURST = 100  # messages read before other tasks on the loop get a turn


class SocketReader:
    """Passes each message that arrives on a socket to `take`, until `close`."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.FD)
        self._is_open = True
        self._loop.add_reader(self._descriptor, self._drain)
        self.nudge()

    def nudge(self) -> None:
        """Check for messages.

        Call it after each send, because a send can clear the socket's read event.
        """
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)

    def _drain(self) -> None:
        for _ in range(_BURST):
            if not self._is_open:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self.nudge()
