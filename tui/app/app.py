"""`Dashboard`: the Textual application, with its screens and what all of them share.

The caller owns the source (of steps), with its history (the steps in memory). It starts the source
before the dashboard runs and stops it afterwards. The dashboard only reads them, and asks a replay
source to seek and play.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType

from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.fleets.fleet import LOOK_S, Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.screens.main import MainScreen
from stepscope.tui.screens.textual_parts import keymap, use_colours
from stepscope.tui.session.live_source import control_of
from stepscope.tui.session.navigator import replay_of
from stepscope.tui.session.session import Session
from stepscope.tui.settings.action_table import Action, Page
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.terminal import forget_empty_no_color, log_path, see_log
from stepscope.tui.views.frame.compare_choices import Origin
from stepscope.tui.views.frame.fleet_view import FleetView
from stepscope.tui.views.theme import Skin, ThemeName, colour_mode
from stepscope.tui.views.view import Axis, Sort

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder

log = logging.getLogger("stepscope.tui")

_NEWCOMERS_S = 2.0  # between two searches for new engines
_SEEK_S = 2.0  # longest wait for a replay to seek to a step


class Dashboard(App[None], inherit_bindings=False):
    """The dashboard: one main screen for each engine that was opened, one of them shown at a time.

    Args:
        source: fills its history from its own daemon thread.
        control_endpoint: as `Endpoint.parse` accepts it. None if the engine has none (a replay):
            actions that change the engine are then hidden.
        fps: None means 10, or 5 over SSH.
        recorder: a recording of `source` that already runs; it ends with `R` or with the dashboard.
        theme: a terminal with 16 colours or with NO_COLOR overrides it.
        preferences: stores what the operator changes; by default nothing is kept.
        any_terminal: use the theme without asking which colours the terminal has; for pictures.
        fleet: several engines, `source` among them; the caller starts and stops them. The dashboard
            opens with a list of them.
        rules: of alerts, for a live engine.
    """

    TITLE = "stepscope"
    CSS = "Screen { padding: 0; border: none; }"
    ENABLE_COMMAND_PALETTE = False  # an action of ours opens it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True)
    ]

    def __init__(
        self,
        source: Source,
        *,
        control_endpoint: str | None = None,
        readonly: bool = False,
        fps: float | None = None,
        ascii_only: bool = False,
        recorder: "Recorder | None" = None,
        theme: ThemeName = "dark",
        sort: Sort = "arrival",
        axis: Axis = "step",
        actions: tuple[Action, ...] = ACTIONS,
        preferences: Preferences | None = None,
        log_file: Path | None = None,
        any_terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
        fleet: Fleet | None = None,
        rules: Sequence[Rule] = (),
    ) -> None:
        forget_empty_no_color()
        super().__init__()
        self.set_keymap(keymap(actions))
        self._fleet_view = FleetView(fleet or Fleet([source], clock), open=self._open_engine)
        self.session = Session(
            source,
            control_endpoint,
            recorder,
            self._fleet_view,
            readonly,
            actions,
            preferences or Preferences(),
            log_file or log_path(),
            clock,
            rules,
        )
        colours = self.console.color_system, self.no_color
        mode = theme if any_terminal else colour_mode(theme, *colours)
        use_colours(self, mode)
        self.main = MainScreen(self.session, Skin(mode, ascii_only), fps)
        self.main.view.sort, self.main.view.axis = sort, axis
        if fleet is not None and len(fleet) > 1:
            self.main.view.page = "fleet"
            fleet.open(source)
        self._screens = {self._fleet_view.name_of(source): self.main}  # by engine name
        self._unkept: str | None = None  # why changed settings were not saved
        self._sides = SideScreens(self._switch_to)
        self.session.compare.open = lambda *what: self._sides.open(self.main, *what)
        self.session.compare.go_home = lambda: self._sides.go_home(self.main)

    def _open_engine(self, name: str, page: Page) -> None:
        """Show a page of this engine on its own screen, which keeps its cursor and settings."""
        before, screen = self.main, self._screens.get(name)
        if screen is None:
            fleet = self._fleet_view.fleet
            source = fleet.sources[fleet.names.index(name)]
            screen = _screen_beside(before, before.session.beside(source, control_of(source)))
            self._screens[name] = screen
            self.install_screen(screen, name)
        if screen is not before:
            before.view.page, before.view.trail = "live", ()
            self._fleet_view.fleet.open(screen.session.source)
        screen.view.page, screen.view.row = page, 0
        screen.view.trail = ("fleet",) if page != "live" else ()
        if len(self._fleet_view.fleet) > 1:
            back = screen.session.abilities.key("back")
            number = len(self._fleet_view.fleet)
            screen.notices.say(f"{name}, one of {number} engines; {back} goes back")
        self._switch_to(screen)

    def _switch_to(self, screen: MainScreen) -> None:
        """Show another main screen; it takes theme, glyphs and frame rate from the one before."""
        before = self.main
        if screen is not before:
            before.is_shown, screen.is_shown = False, True
            self.session, self.main = screen.session, screen
            if screen.is_mounted:
                screen.set_skin(before.skin)
                screen.set_fps(before.fps)
            # The first engine's screen is the default screen, which Textual cannot switch from.
            if len(self.screen_stack) > 1:
                self.pop_screen()
            if screen is not self.screen:
                self.push_screen(screen)
        if screen.is_mounted:
            screen.draw()

    def compare(self, a: Origin, b: Origin, align: Align) -> None:
        """Show the comparison of two runs; raise RecordingError if one cannot be read."""
        state = self.main.session.compare
        state.begin(a, b)
        state.align = align
        self.main.view.show("compare")

    def get_default_screen(self) -> MainScreen:
        return self.main

    def on_mount(self) -> None:
        for name, screen in self._screens.items():
            self.install_screen(screen, name)
        self.set_interval(LOOK_S, self._look_at_engines)
        self.set_interval(_NEWCOMERS_S, self._fleet_view.fleet.take_in)
        asyncio.get_running_loop().set_exception_handler(self._note_loop_error)
        # Another program may have drawn on the terminal: write every cell again.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))

    def _look_at_engines(self) -> None:
        """Refresh the figures of all engines: their list measures for how long one stands out."""
        if len(self._fleet_view.fleet) > 1:
            self._fleet_view.fleet.look()

    def _note_loop_error(
        self, loop: asyncio.AbstractEventLoop, context: Mapping[str, object]
    ) -> None:
        error = context.get("exception")
        what = str(context.get("message", "a task failed"))
        log.error("%s", what, exc_info=error if isinstance(error, BaseException) else None)
        self.session.background_error = f"{what}, {see_log(error)}"

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent) and not self.screen_stack:
            return  # typed while the application ends
        await super().on_event(event)

    def on_key(self, event: events.Key) -> None:
        """Show why a key that no screen has handled does nothing."""
        if self.screen is self.main:
            self.main.explain(event.key)

    def close(self) -> None:
        """Stop threads, recordings and exports of all sessions, and save the preferences."""
        self._unkept = self.session.preferences.save()
        self.session.compare.end()
        self.session.exports.close()
        self._sides.close()
        for screen in self._screens.values():
            for each in (screen.session.link, screen.session.autopilot):
                if each is not None:
                    each.close()
        self.session.switches.stop()

    def last_words(self) -> list[str]:
        """Return a line for each recording, and one if settings are not kept; after `close`."""
        unkept = [] if self._unkept is None else [self._unkept]
        return [*self.session.switches.last(), *unkept]


def _screen_beside(before: MainScreen, session: Session) -> MainScreen:
    screen = MainScreen(session, before.skin, before.fps)
    screen.view.sort, screen.view.axis = before.view.sort, before.view.axis
    return screen


class SideScreens:
    """The screens of compared recordings, made on demand; `switch` shows one."""

    def __init__(self, switch: Callable[[MainScreen], None]) -> None:
        self._switch = switch
        self._home: MainScreen | None = None
        self._opened: dict[Path, MainScreen] = {}

    def open(
        self, home: MainScreen, origin: Origin, step: int | None, request_id: int | None
    ) -> None:
        """Show a compared run at a step or request (`home` has both); may raise RecordingError."""
        self._home = home
        screen = home
        if not origin.is_shown and origin.path is not None:
            screen = self._opened.get(origin.path) or self._new(home, origin, origin.path)
        if step is not None:
            screen.navigator.go(step)
            if (replay := replay_of(screen.session.source)) is not None:
                replay.wait(_SEEK_S)
        view = screen.view
        view.trail, view.row = ("compare",), 0
        view.selected = request_id if request_id is not None else view.selected
        view.page = "step" if request_id is None else "request"
        self._switch(screen)

    def go_home(self, screen: MainScreen) -> None:
        if screen in self._opened.values() and self._home is not None:
            screen.view.leave()
            self._home.view.page, self._home.view.trail = "compare", ("live",)
            self._switch(self._home)

    def close(self) -> None:
        for screen in self._opened.values():
            screen.session.source.stop()
        self._opened.clear()

    def _new(self, home: MainScreen, origin: Origin, path: Path) -> MainScreen:
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed
        from stepscope.recordings.replay.replay import ReplaySource

        source = ReplaySource(Recording(path), History(origin.slo), playing=False)
        source.start()
        # Its own fleet, because it is not one of the watched engines.
        session = home.session.beside(source, None)
        session.fleet_view = FleetView(Fleet([source], session.clock))
        screen = _screen_beside(home, session)
        home.app.install_screen(screen, f"side {len(self._opened)} {origin.name}")
        self._opened[path] = screen
        return screen
