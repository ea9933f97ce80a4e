"""`run_dashboard`: runs the dashboard in a terminal, until the operator leaves it.

A signal ends it as the quit key does: terminal restored, files complete. A terminal that hangs up
(its window or connection closes) is noticed at once. Other signs are not enough: the kernel sends
SIGHUP only to processes that the terminal controls; a screen that does not change writes nothing,
so no write fails; and a read only returns end of input again.
"""

import asyncio
import gc
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any, TextIO, cast

from textual.app import App

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.terminal import (
    in_browser,
    logged_to_file,
    only_ascii,
    see_log,
)
from stepscope.tui.views.frame.compare_choices import Origin

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LEAVE, _CLEAR = "\x1b[?1049l", "\x1b[0m\x1b[2J"  # the alternate screen
_GRACE_S = 5.0  # a screen that has not ended by then waits for a terminal that is gone


@contextmanager
def left_on_signals(app: App[Any], close: Callable[[], None]) -> Iterator[None]:
    """Inside this context, end the dashboard on SIGTERM or when the terminal goes away.

    Further signals are ignored.

    `close`: ends what `app` holds besides its screen (threads, recordings). Called at the end in
    any case.

    Raises SystemExit: a signal came; the code is 128 plus its number, as in shells.
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
        except RuntimeError:  # the application does not run yet, or has ended
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
    """Wraps the file that Textual's writer thread writes to.

    Drops writes once the terminal is gone.

    An error would kill the writer thread: the log would show it as a fault of stepscope, and the
    screen would wait for the thread for ever.

    Before Textual leaves the alternate screen, this class clears that screen. Otherwise, if the
    terminal grew meanwhile, tmux (3.3a) would show the last lines of the dashboard above those of
    the shell.
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
        """Context for a write: if it fails, end as SIGHUP does, which may come late or never."""
        try:
            yield
        except OSError:
            self._is_gone = True
            _hang_up()


def _hang_up() -> None:
    """Send SIGHUP to this process, as the kernel does to processes that the terminal controls."""
    os.kill(os.getpid(), signal.SIGHUP)


@contextmanager
def _terminal_may_go() -> Iterator[None]:
    """Inside this context, Textual writes through a `_Terminal`, which survives a lost terminal.

    Textual writes to `sys.__stderr__`, which is replaced here. If standard error is redirected to a
    file, the terminal on standard output is taken.
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


@contextmanager
def noticed_hang_up(gone: Callable[[], None]) -> Iterator[None]:
    """Inside this context, call `gone` once, from a thread, if the terminal hangs up."""
    terminals = [
        stream.fileno()
        for stream in (sys.__stdin__, sys.__stderr__)
        if stream is not None and (stream.isatty() or (in_browser() and stream is sys.__stdin__))
    ]
    if not terminals:  # a pipe that ends is not a terminal that hangs up, but of a browser's server
        yield
        return
    ended, end = os.pipe()
    watcher = Thread(
        target=_watch, args=(terminals, ended, gone), name="terminal watch", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        os.close(end)
        watcher.join()
        os.close(ended)


def _watch(terminals: list[int], ended: int, gone: Callable[[], None]) -> None:
    poll = select.poll()
    for number in (*terminals, ended):
        poll.register(number, 0)  # poll reports hang-ups and errors without a flag
    while True:
        for number, what in poll.poll():
            if number == ended:
                return
            if what & select.POLLHUP:
                gone()
                return
            poll.unregister(number)  # this system cannot poll a terminal


log = logging.getLogger("stepscope.tui")


def run_dashboard(
    source: Source,
    history: History,
    *,
    ascii: bool | None = None,
    compared: tuple[Origin, Origin, Align] | None = None,
    news: Callable[[], str | None] | None = None,
    tour: Tour | None = None,
    **options: Any,
) -> None:
    """Run the dashboard in this terminal until the operator quits. Blocks.

    Args:
        ascii: draw with ASCII characters only. None means only if the terminal needs it.
        compared: two runs to compare, and how to align them. The dashboard opens with them.
        news: called in every frame; returns a notice for the operator, or None.
        tour: a guided tour, shown above the screen, with its own keys.

    The other arguments are those of `Dashboard`.

    Raises SystemExit: the application itself failed and has printed why, or a signal ended it. If a
    source, recorder or engine fails, a line on the screen says so instead.
    """
    why_ascii = only_ascii(os.environ) if ascii is None else None
    app = Dashboard(source, history, ascii_only=ascii or why_ascii is not None, **options)
    if compared is not None:
        app.compare(*compared)
    if news is not None:
        app.main.news = news
    if tour is not None:
        app.session.begin_tour(tour)
    if why_ascii is not None:
        key = app.session.abilities.key("glyphs")
        text = f"ASCII characters only: {why_ascii}; {key} or --no-ascii draws blocks anyway"
        app.main.notices.say(text, "caution")
    with (
        left_on_signals(app, app.close),
        logged_to_file(app.session.log_file),
        shown_thread_errors(app),
        calm_collector(),
    ):
        app.run()
    for line in app.last_words():
        print(line)
    if app.return_code:
        raise SystemExit(app.return_code)


@contextmanager
def shown_thread_errors(app: Dashboard) -> Iterator[None]:
    """Inside this context, show an exception that ends a background thread as a line on screen."""
    before = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        name = "a thread" if args.thread is None else args.thread.name
        log.error("%s died", name, exc_info=args.exc_value)
        app.session.background_error = f"{name} died, {see_log(args.exc_value)}"

    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def calm_collector() -> Iterator[None]:
    """Inside this context, collect cyclic garbage less often: a tenth of the cost of drawing."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
