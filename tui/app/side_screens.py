"""`SideScreens`: opens either of two compared runs (a "side") on a screen of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import History
from stepscope.tui.screens.main import MainScreen
from stepscope.tui.session.session_maker import SessionMaker
from stepscope.tui.session.time.navigator import replay_of
from stepscope.tui.views.frame.compare_origin import Origin
from stepscope.tui.views.frame.fleet_view import FleetView

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource

_SEEK_S = 2.0  # longest wait for a replay to seek to a step


class SideScreens:
    """The screens of compared recordings, made on demand; each replays its recording.

    Args:
        sessions: makes the session of a screen.
        switch: shows a screen.
    """

    def __init__(self, sessions: SessionMaker, switch: Callable[[MainScreen], None]) -> None:
        self._sessions = sessions
        self._switch = switch
        self._home: MainScreen | None = None
        self._opened: dict[Path, tuple[ReplaySource, MainScreen]] = {}

    @property
    def screens(self) -> list[MainScreen]:
        return [screen for _, screen in self._opened.values()]

    def is_side(self, screen: MainScreen) -> bool:
        return any(each is screen for each in self.screens)

    def open(
        self, home: MainScreen, origin: Origin, step: int | None, request_id: int | None
    ) -> None:
        """Show one of the compared runs, at a step or with a request selected.

        Args:
            home: the screen that shows the comparison.
            step: the step to show; None keeps the step of that run's screen.
            request_id: the request to show; None shows the page of the step.

        Raises:
            RecordingError: the run's recording cannot be read any more.
        """
        self._home = home
        screen = home
        if not origin.is_shown and origin.path is not None:
            source, screen = self._opened.get(origin.path) or self._new(home, origin)
            if step is not None:
                source.seek(step)
                source.wait(_SEEK_S)
        elif step is not None:
            screen.navigator.go(step)
            if (replay := replay_of(home.session.source)) is not None:
                replay.wait(_SEEK_S)
        view = screen.view
        view.trail, view.row = ("compare",), 0
        view.selected = request_id if request_id is not None else view.selected
        view.page = "step" if request_id is None else "request"
        self._switch(screen)

    def go_home(self, screen: MainScreen, page: str) -> None:
        """From the screen of a compared run, go back to the comparison.

        On other screens do nothing.
        """
        if self.is_side(screen) and self._home is not None:
            screen.view.leave()
            self._home.view.page, self._home.view.trail = "compare", ("live",)
            self._switch(self._home)

    def close(self) -> None:
        for source, _ in self._opened.values():
            source.stop()
        self._opened.clear()

    def _new(self, home: MainScreen, origin: Origin) -> "tuple[ReplaySource, MainScreen]":
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed
        from stepscope.recordings.replay.replay import ReplaySource

        assert origin.path is not None
        source = ReplaySource(Recording(origin.path), History(origin.slo), playing=False)
        source.start()
        # Its own fleet, because it is not one of the watched engines.
        sessions = replace(
            self._sessions,
            fleet_view=FleetView(Fleet([source], self._sessions.clock)),
            readonly=True,
        )
        screen = MainScreen(sessions.make(source, source.history, None), home.skin, home.fps)
        screen.view.sort, screen.view.axis = home.view.sort, home.view.axis
        home.app.install_screen(screen, f"side {len(self._opened)} {origin.name}")
        self._opened[origin.path] = source, screen
        return source, screen
