"""`Outbox`: replies for the one thread that owns the socket, and the descriptor that wakes it."""

import os
from collections import deque
from collections.abc import Iterator

from stepscope.engine.control.remote_client import Outgoing


class Outbox:
    """Filled from any thread, emptied by one.

    Attributes:
        descriptor: readable when a new reply waits; for a poller.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._is_woken = False  # and has not looked since
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def post(self, outgoing: Outgoing) -> None:
        self._waiting.append(outgoing)
        self.wake()

    def wake(self) -> None:
        # A step may post hundreds; only the first wakes the reader. The others are read with it,
        # because `awake` clears the flag before the reader looks.
        if not self._is_woken:
            self._is_woken = True
            os.write(self._write, b"\0")

    def awake(self) -> None:
        """To be called when `descriptor` is readable, before `take`."""
        os.read(self.descriptor, 65536)
        self._is_woken = False

    def take(self) -> Iterator[Outgoing]:
        """What waits now, oldest first; what comes meanwhile wakes again."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        self._is_woken = True  # a later post must not write to another file with our number
        os.close(self.descriptor)
        os.close(self._write)
