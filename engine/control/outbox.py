"""`Outbox`: a queue of replies for the thread that owns the socket.

It has a file descriptor that wakes this thread.
"""

import os
from collections import deque
from collections.abc import Iterator

from stepscope.engine.control.remote_client import Outgoing


class Outbox:
    """A queue of replies. Any thread may add replies, and only one thread takes them.

    Attributes:
        descriptor: a file descriptor for a poller, readable when a new reply waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._is_woken = False  # True from a wake-up until the reader calls `awake`
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
        """Make `descriptor` unreadable until the next reply. Call it before `take`."""
        os.read(self.descriptor, 65536)
        self._is_woken = False

    def take(self) -> Iterator[Outgoing]:
        """Yield the replies that wait now, oldest first. A later reply wakes the reader again."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        self._is_woken = True  # so that no later post writes to a reused descriptor number
        os.close(self.descriptor)
        os.close(self._write)
