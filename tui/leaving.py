"""How a signal ends a screen: as its own key would, with the terminal and the files in order."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any

from textual.app import App

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 5.0  # a screen that is not left by then waits for a terminal that is gone


@contextmanager
def left_on_signals(app: App[Any], close: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that goes away, leave the screen; a second one is patience.

    Args:
        app: it is run inside.
        close: ends what `app` keeps besides its screen; called here, once, in any case.

    Raises:
        SystemExit: a signal came; the code is 128 and its number, as shells have it.
    """
    received: list[int] = []
    is_left = Event()

    def insist(number: int) -> None:
        if not is_left.wait(_GRACE_S):
            close()
            os._exit(128 + number)

    def leave(number: int, frame: FrameType | None) -> None:
        if received:
            return
        received.append(number)
        Thread(target=insist, args=(number,), name="leaving", daemon=True).start()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # not on the screen yet, or not any more
            if is_left.is_set():
                return
            raise SystemExit(128 + number) from None
        loop.call_soon_threadsafe(app.exit, None, 128 + number)

    before = [signal.signal(each, leave) for each in _ENDING]
    try:
        try:
            yield
        finally:
            is_left.set()
            close()
        if received:
            raise SystemExit(128 + received[0])
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)
