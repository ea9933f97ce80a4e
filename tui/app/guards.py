"""Settings of the process while the dashboard runs: errors in threads, garbage collection.

They are context managers.
"""

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.log_file import see_log

log = logging.getLogger("stepscope.tui")


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
    """Inside this context, Python collects cyclic garbage less often.

    A frame makes many small objects and hardly any cycles. Measured: this saves a tenth of the cost
    of drawing.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
