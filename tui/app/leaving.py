"""Ends a screen on a signal as the quit key does: the terminal restored, the files complete."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any, TextIO, cast

from textual.app import App

from stepscope.tui.app.hang_up import noticed_hang_up

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LEAVE, _CLEAR = "\x1b[?1049l", "\x1b[0m\x1b[2J"  # the alternate screen
_GRACE_S = 5.0  # a screen that is not left by then waits for a terminal that is gone


@contextmanager
def left_on_signals(app: App[Any], close: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, and a terminal that goes away, leave the screen; a second signal changes nothing.

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
            with _terminal_may_go(), noticed_hang_up(_hang_up):
                yield
        finally:
            is_left.set()
            close()
        if received:
            raise SystemExit(128 + received[0])
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)


class _Terminal:
    """The file Textual's writer thread writes to; drops writes once the terminal is gone.

    A thread that died of it would be in the log as a fault of ours, and the screen would wait for
    it for ever.

    The screen is left empty: of one that was made larger meanwhile, tmux (3.3a) would show the last
    lines above those of the shell.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._is_gone = False

    def write(self, text: str) -> None:
        if not self._is_gone:
            with self._noticed():
                self._terminal.write(text.replace(_LEAVE, _CLEAR + _LEAVE))

    def flush(self) -> None:
        if not self._is_gone:
            with self._noticed():
                self._terminal.flush()

    def fileno(self) -> int:
        return self._terminal.fileno()

    def isatty(self) -> bool:
        return self._terminal.isatty()

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        """The kernel's own signal need not come, or comes later: leave as if it had."""
        try:
            yield
        except OSError:
            self._is_gone = True
            _hang_up()


def _hang_up() -> None:
    """As the kernel does where the terminal controls this process."""
    os.kill(os.getpid(), signal.SIGHUP)


@contextmanager
def _terminal_may_go() -> Iterator[None]:
    """What is drawn goes through a `_Terminal`; Textual takes standard error by this name.

    Where errors go to a file, the terminal is on standard output.
    """
    before, output = sys.__stderr__, sys.__stdout__
    terminal = before
    if output is not None and output.isatty() and not (before is not None and before.isatty()):
        terminal = output
    if terminal is not None:
        sys.__stderr__ = cast("Any", _Terminal(terminal))  # type: ignore[misc]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]
