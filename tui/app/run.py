"""Running the dashboard in a terminal, until the operator leaves it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.app.guards import calm_collector, shown_thread_errors
from stepscope.tui.app.late_modules import loaded_soon
from stepscope.tui.app.leaving import left_on_signals
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.action_table import Action
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.settings.log_file import logged_to_file
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.terminal import only_ascii, said_environment
from stepscope.tui.views.frame.compare_origin import Origin
from stepscope.tui.views.theme import ThemeName
from stepscope.tui.views.view import Axis, Sort

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder


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
    own_load: bool = False,
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
        source: fills `history` from its own daemon thread; started and stopped by the caller.
        history: what is drawn; its SLO defines a breach.
        control_endpoint: control address of the engine, as `Endpoint.parse` takes it; None where
            there is none (a replay): actions that change the engine are hidden then.
        readonly: hide and disable everything that changes the engine.
        fps: frames a second; None: 10, or 5 over SSH. `+` and `-` change it.
        ascii: draw with ASCII characters only; None: where the terminal can show no others.
        recorder: a recording of `source` that is under way already; it ends with `R` or with the
            dashboard. Without one `R` starts a new file in the current folder.
        on_exit: called once after the terminal is restored, also after an error.
        title: shown first in the header line, and the title of screenshots.
        theme: "dark" or "light"; `T` changes it. 16 colours and NO_COLOR are found out from the
            terminal.
        sort, axis: how the lanes and the charts begin.
        own_load: the header says what the dashboard itself costs.
        actions: the action table, with the keys that the operator wants.
        preferences: takes what the operator changes; by default it is forgotten.
        log_file: where errors are written; by default a file in the state folder of the platform.
        fleet: several engines, `source` among them, started and stopped by the caller; they are
            shown side by side to begin with.
        compared: two runs to be compared, and how they are aligned; they are shown to begin with.
        rules: watched on a live engine; one that fires shows a line, rings the bell, sets a mark.
        news: called in every frame; returns a notice for the operator, or None.
        tour: shown above the screen, with keys of its own.

    Raises:
        SystemExit: the application itself broke, and has printed how, or a signal ended it. A
            failing source, recorder or engine is a visible line instead.
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
        own_load=own_load,
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
            loaded_soon(),
        ):
            app.run()
        for line in app.recordings():
            print(line)
        if app.return_code:
            raise SystemExit(app.return_code)
    finally:
        if on_exit is not None:
            on_exit()
