"""`StepNotes`: what the engine's thread noted of its steps, until another thread has read it.

The engine's thread only writes down what will not be true any more a moment later. Records are made
from it while the engine waits for its model.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class StepNotes:
    """Notes are read in order, by one thread at a time."""

    def __init__(self) -> None:
        self._notes: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._reading = threading.RLock()
        self._has_failed = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, read: Callable[..., object], *args: object) -> None:
        """Note something: `read(*args)` is called later, on whichever thread reads."""
        self._notes.append((read, args))

    def wake(self) -> None:
        """Whoever is in `wait` goes on."""
        if self._news.empty():
            self._news.put(None)

    def wait(self, timeout_s: float) -> None:
        """Until the next `wake`, or so long."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=timeout_s)

    def read(self) -> None:
        """Read all that was noted. Raises what reading raises; nothing is read any more then."""
        notes = self._notes
        with self._reading:
            while notes:
                read, args = notes.popleft()
                if self._has_failed:
                    continue
                try:
                    read(*args)
                except BaseException:
                    self._has_failed = True
                    raise

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """All that was noted is read, and no other thread reads meanwhile."""
        with self._reading:
            self.read()
            yield
