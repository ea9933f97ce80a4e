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
from functools import partial
from threading import Event, Thread
from types import FrameType
from typing import Any, TextIO, cast

from textual.app import App

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.session.tour import Tour
from stepscope.tui.settings.terminal import in_browser, logged_to_file, only_ascii, see_log
from stepscope.tui.views.frame.compare_choices import Origin

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 5.0  # a screen that has not ended by then waits for a terminal that is gone


@contextmanager
def left_on_signals(app: App[Any], close: Callable[[], None]) -> Iterator[None]:
    """Inside this context, end the dashboard on the first SIGTERM or when the terminal goes away.

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
            with _terminal_may_go(), _noticed_hang_up():
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
    """The file that Textual's writer thread writes to; it drops writes once the terminal is gone.

    An error would kill that thread, and the screen would wait for it for ever. A write that fails
    ends the dashboard as SIGHUP does, which may come late or never.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._is_gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> None:
        self._try(partial(self._terminal.write, text))

    def flush(self) -> None:
        self._try(self._terminal.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            act()
        except OSError:
            self._is_gone = True
            _hang_up()


def _hang_up() -> None:
    """Send SIGHUP to this process, as the kernel does to processes that the terminal controls."""
    os.kill(os.getpid(), signal.SIGHUP)


@contextmanager
def _terminal_may_go() -> Iterator[None]:
    """Inside this context, Textual writes through a `_Terminal`, which survives a lost terminal.

    Textual writes to `sys.__stderr__`. If that is a file, the terminal on standard output is taken.
    """
    before = sys.__stderr__
    files = [each for each in (before, sys.__stdout__) if each is not None]
    terminal = next((each for each in files if each.isatty()), before)
    if terminal is not None:
        sys.__stderr__ = cast("Any", _Terminal(terminal))  # type: ignore[misc]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]


@contextmanager
def _noticed_hang_up() -> Iterator[None]:
    """Inside this context, send SIGHUP to this process, from a thread, if the terminal hangs up."""
    terminals = [
        stream.fileno()
        for stream in (sys.__stdin__, sys.__stderr__)
        if stream is not None and (stream.isatty() or (in_browser() and stream is sys.__stdin__))
    ]
    if not terminals:  # a pipe that ends is not a terminal that hangs up, but of a browser's server
        yield
        return
    ended, end = os.pipe()
    watcher = Thread(target=_watch, args=(terminals, ended), name="terminal watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(end)
        watcher.join()
        os.close(ended)


def _watch(terminals: list[int], ended: int) -> None:
    poll = select.poll()
    for number in (*terminals, ended):
        poll.register(number, 0)  # poll reports hang-ups and errors without a flag
    while True:
        for number, what in poll.poll():
            if number == ended:
                return
            if what & select.POLLHUP:
                _hang_up()
                return
            poll.unregister(number)  # this system cannot poll a terminal


log = logging.getLogger("stepscope.tui")


def run_dashboard(
    source: Source,
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
    app = Dashboard(source, ascii_only=ascii or why_ascii is not None, **options)
    if compared is not None:
        app.compare(*compared)
    if news is not None:
        app.main.news = news
    if tour is not None:
        app.session.begin_tour(tour)
    if why_ascii is not None:
        key = app.session.abilities.key("glyphs")
        text = f"ASCII characters only: {why_ascii}; {key} or --no-ascii draws blocks anyway"
        app.main.notices.warn(text)
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
