"""Notices at once when the terminal hangs up (its window or connection closes).

Until then it costs nothing. Other signs are not enough: the kernel sends SIGHUP only to processes
that the terminal controls; a screen that does not change writes nothing, so no write fails; and a
read only returns end of input again and again.
"""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread


@contextmanager
def noticed_hang_up(gone: Callable[[], None]) -> Iterator[None]:
    """Inside this context, call `gone` once if the terminal of this process hangs up.

    The call comes from a separate thread.
    """
    terminals = [
        stream.fileno()
        for stream in (sys.__stdin__, sys.__stderr__)
        if stream is not None and stream.isatty()
    ]
    if not terminals:  # a pipe that ends is not a terminal that hangs up
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
