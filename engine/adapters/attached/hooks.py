"""`Hooks`: wraps methods of single objects of the engine. `StepNotes`: queues what they see.

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

_ABSENT = object()


class Hooks:
    """Wraps methods of objects. Their classes and other instances stay unchanged."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, object, object]] = []  # our wrapper, what was before it

    def wrap(
        self, target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace the method called `name`, if there is one, by what `wrap` returns for it."""
        if hasattr(target, name):
            before, ours = vars(target).get(name, _ABSENT), wrap(getattr(target, name))
            setattr(target, name, ours)
            self._wrapped.append((target, name, ours, before))

    def restore(self) -> None:
        """Restore the original methods, except those that other code has wrapped since."""
        for target, name, ours, before in self._wrapped:
            if vars(target).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self._wrapped.clear()


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
