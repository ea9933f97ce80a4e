"""How the dashboard looks: what is changed here is kept for the next time."""

from typing import TYPE_CHECKING

from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.service_levels import said
from stepscope.tui.theme import Skin, ThemeName

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen


def axis(screen: "MainScreen") -> None:
    screen.view.next_axis()
    screen.session.preferences.set("axis", screen.view.axis)


def glyphs(screen: "MainScreen") -> None:
    screen.set_skin(Skin(screen.skin.mode, not screen.skin.ascii_only))
    screen.session.preferences.set("ascii", screen.skin.ascii_only)


def theme(screen: "MainScreen") -> None:
    mode = screen.skin.mode
    if mode not in ("dark", "light"):
        screen.notices.say(
            "this terminal's own colours are used; there is no other theme", "caution"
        )
        return
    other: ThemeName = "light" if mode == "dark" else "dark"
    screen.set_skin(Skin(other, screen.skin.ascii_only))
    screen.session.preferences.set("theme", other)


def frames(screen: "MainScreen", change: int) -> None:
    screen.set_fps(screen.fps + change)
    screen.session.preferences.set("fps", screen.fps)


def own_load(screen: "MainScreen") -> None:
    screen.view.own_load = not screen.view.own_load
    screen.session.preferences.set("own_load", screen.view.own_load)


def use_levels(screen: "MainScreen", slo: SLO) -> None:
    """These service levels, for all engines of this dashboard; says which hold now."""
    session = screen.session
    preferences = session.preferences
    # The demo's, and those of a file that carries its own, are for nothing else.
    for_now = "" if preferences.has("slo_ttft_ms") else ", for this session only"
    screen.notices.say(f"service levels: {said(slo)}{for_now}", "good")
    for history in {session.history, *(each.history for each in session.desk.fleet.sources)}:
        history.set_slo(slo)
    screen.scene.forget()
    preferences.set("slo_ttft_ms", slo.ttft_ms)
    preferences.set("slo_itl_ms", slo.itl_ms)
    screen.draw()
