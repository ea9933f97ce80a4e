"""`run_dashboard`: runs the dashboard in a terminal, until the operator leaves it."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.app.leaving import left_on_signals
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.action_table import Action
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.settings.log_file import logged_to_file, see_log
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.terminal import only_ascii, said_environment
from stepscope.tui.views.frame.compare_choices import Origin
from stepscope.tui.views.theme import ThemeName
from stepscope.tui.views.view import Axis, Sort

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder

log = logging.getLogger("stepscope.tui")


def run_dashboard(
    source: Source,
    history: History,
    *,
    control_endpoint: str | None = None,
    readonly: bool = False,
    fps: float | None = None,
    ascii: bool | None = None,
    recorder: "Recorder | None" = None,
    on_exit: Callable[[], None] | None = None,
    title: str = "stepscope",
    theme: ThemeName = "dark",
    sort: Sort = "arrival",
    axis: Axis = "step",
    actions: tuple[Action, ...] = ACTIONS,
    preferences: Preferences | None = None,
    log_file: Path | None = None,
    fleet: Fleet | None = None,
    compared: tuple[Origin, Origin, Align] | None = None,
    news: Callable[[], str | None] | None = None,
    rules: Sequence[Rule] = (),
    tour: Tour | None = None,
) -> None:
    """Run the dashboard in this terminal until the operator quits. Blocks.

    Args:
        source: fills `history` from its own daemon thread; the caller starts and stops it.
        history: the steps to draw; its SLO defines a breach.
        control_endpoint: control address of the engine, as `Endpoint.parse` accepts it. None if the
            engine has none (a replay): actions that change the engine are then hidden.
        readonly: hide and disable everything that changes the engine.
        fps: frames per second; `+` and `-` change it. None means 10, or 5 over SSH.
        ascii: draw with ASCII characters only. None means only if the terminal needs it.
        recorder: a recording of `source` that already runs; it ends with `R` or with the dashboard.
            Without it, `R` starts a new file in the current folder.
        on_exit: called once after the terminal is restored, also after an error.
        title: the first words of the header line, and the title of screenshots.
        theme: "dark" or "light"; `T` changes it. A terminal with 16 colours or with NO_COLOR
            overrides it.
        sort, axis: the initial order of the lanes, and the initial axis of the charts.
        actions: the action table, with the operator's choice of keys.
        preferences: stores what the operator changes; by default nothing is kept.
        log_file: the file for errors; by default a file in the platform's state folder.
        fleet: several engines, `source` among them; the caller starts and stops them. The dashboard
            opens with a list of them.
        compared: two runs to compare, and how to align them. The dashboard opens with them.
        rules: alert rules for a live engine; a rule that fires shows a line, rings the bell and
            sets a mark.
        news: called in every frame; returns a notice for the operator, or None.
        tour: a guided tour, shown above the screen, with its own keys.

    Raises:
        SystemExit: the application itself failed and has printed why, or a signal ended it. If a
            source, recorder or engine fails, a line on the screen says so instead.
    """
    why_ascii = only_ascii(said_environment()) if ascii is None else None
    app = Dashboard(
        source,
        history,
        control_endpoint=control_endpoint,
        readonly=readonly,
        fps=fps,
        ascii_only=ascii or why_ascii is not None,
        recorder=recorder,
        title=title,
        theme=theme,
        sort=sort,
        axis=axis,
        actions=actions,
        preferences=preferences,
        log_file=log_file,
        fleet=fleet,
        rules=rules,
    )
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
    try:
        with (
            left_on_signals(app, app.close),
            logged_to_file(app.session.log_file),
            shown_thread_errors(app),
            calm_collector(),
        ):
            app.run()
        for line in app.recordings():
            print(line)
        if app.return_code:
            raise SystemExit(app.return_code)
    finally:
        if on_exit is not None:
            on_exit()


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
