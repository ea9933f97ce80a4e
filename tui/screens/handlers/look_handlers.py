"""Handlers of the actions that change how the dashboard looks.

The changes are saved for the next start.
"""

from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.screens.handlers.handled_screen import HandledScreen
from stepscope.tui.settings.service_levels import said
from stepscope.tui.views.theme import Skin, ThemeName


class LookHandlers:
    """The handlers of one screen that change how it looks."""

    def __init__(self, screen: HandledScreen) -> None:
        self._screen = screen
        self._session, self._view, self._notices = screen.session, screen.view, screen.notices

    def axis(self) -> None:
        self._view.next_axis()
        self._session.prefer("axis", self._view.axis)

    def glyphs(self) -> None:
        self._screen.set_skin(Skin(self._screen.skin.mode, not self._screen.skin.ascii_only))
        self._session.prefer("ascii", self._screen.skin.ascii_only)

    def theme(self) -> None:
        mode = self._screen.skin.mode
        if mode not in ("dark", "light"):
            self._notices.say(
                "this terminal's own colours are used; there is no other theme", "caution"
            )
            return
        other: ThemeName = "light" if mode == "dark" else "dark"
        self._screen.set_skin(Skin(other, self._screen.skin.ascii_only))
        self._session.prefer("theme", other)

    def frames(self, change: int) -> None:
        self._screen.set_fps(self._screen.fps + change)
        self._session.prefer("fps", self._screen.fps)

    def use_levels(self, slo: SLO) -> None:
        """Set these service levels for all engines of this dashboard, and confirm with a notice."""
        session = self._session
        # The levels of the demo or of a recording apply to nothing else, so they are not kept.
        for_now = "" if session.keeps("slo_ttft_ms") else ", for this session only"
        self._notices.say(f"service levels: {said(slo)}{for_now}", "good")
        for history in {
            session.history,
            *(each.history for each in session.fleet_view.fleet.sources),
        }:
            history.set_slo(slo)
        self._screen.forget()
        session.prefer("slo_ttft_ms", slo.ttft_ms)
        session.prefer("slo_itl_ms", slo.itl_ms)
        self._screen.draw()
