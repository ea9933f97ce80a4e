"""`StepNotes`: a queue of the engine thread's notes about its steps, for another thread to process.

A note is a call with its arguments. The engine's thread only queues notes, about what is going to
change. Another thread makes the calls, which build the step records, while the engine waits for its
model.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class StepNotes:
    """A queue of calls. Any thread may make them, one thread at a time."""

    def __init__(self) -> None:
        self._notes: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._reading = threading.RLock()
        self._has_failed = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, read: Callable[..., object], *args: object) -> None:
        """Queue the call `read(*args)`, for the thread that next calls `StepNotes.read`."""
        self._notes.append((read, args))

    def wake(self) -> None:
        """Wake the thread that waits in `wait`, or let the next `wait` return at once."""
        if self._news.empty():
            self._news.put(None)

    def wait(self, timeout_s: float) -> None:
        """Block until the next `wake`, or until `timeout_s` has passed."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=timeout_s)

    def read(self) -> None:
        """Make all queued calls, in order.

        If a call raises an error, the error is passed on, and all later notes are dropped.
        """
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
        """Make all queued calls, then run the `with` block, while no other thread reads notes."""
        with self._reading:
            self.read()
            yield
