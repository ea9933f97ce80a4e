"""`run_dashboard`: runs the dashboard in a terminal, until the operator leaves it."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.app.leaving import left_on_signals
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.log_file import logged_to_file, see_log
from stepscope.tui.settings.terminal import only_ascii, said_environment
from stepscope.tui.views.frame.compare_choices import Origin

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

    Raises:
        SystemExit: the application itself failed and has printed why, or a signal ended it. If a
            source, recorder or engine fails, a line on the screen says so instead.
    """
    why_ascii = only_ascii(said_environment()) if ascii is None else None
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
