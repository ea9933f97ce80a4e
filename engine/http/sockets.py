"""`SocketReader`: the messages of a ZeroMQ socket, on an asyncio loop, a burst at a time.

zmq.asyncio makes two futures a message; at one message a token that is most of the work, so the
loop watches the socket's file descriptor itself and takes all there is.
"""

import asyncio
from collections.abc import Callable

import zmq

_BURST = 100  # messages taken before others on the loop get their turn


class SocketReader:
    """Hands each message that comes to `take`, until it is closed. Does not own the socket."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.FD)
        self._is_open = True
        self._loop.add_reader(self._descriptor, self._drain)
        self.nudge()

    def nudge(self) -> None:
        """Look again. To be called after each send: it may swallow the sign of a new message."""
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
