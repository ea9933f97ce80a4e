"""Handles signals that ask a command to end.

`StopSignals` notes a signal for the command to check. `ending_on_signals` ends it like Ctrl-C.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignals:
    """A context in which the first signal is only noted; a second signal has its default effect."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before: list[Any] = []
        self.received: int | None = None  # the first signal

    def __bool__(self) -> bool:
        return self.received is not None

    def wait(self, seconds: float) -> bool:
        """Sleep, then return whether a signal has arrived."""
        # No lock and no event: a handler that interrupts the holder of a lock would deadlock.
        if self.received is None:
            time.sleep(seconds)
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        self._before = [signal.signal(number, self._note) for number in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._numbers, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._numbers:
            default = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, default)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end the command like Ctrl-C, even where that was ignored."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handlers = (leave, leave, signal.default_int_handler)
    before = [signal.signal(*pair) for pair in zip(numbers, handlers, strict=True)]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
