"""`StopSignals`: notes signals that ask a command to end, for the command to check."""

import signal
import time
from types import FrameType
from typing import Any


class StopSignals:
    """Inside its block, the first signal is only noted; a second one has its default effect."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
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
