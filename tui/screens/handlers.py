"""The handlers of all actions on the main screen.

Those here change how the dashboard looks, which is saved for the next start, or concern the session
as a whole: record it, show the one before, save a picture of it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from textual.app import App

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.output import writing
from stepscope.recordings.file.mcap.format import default_name
from stepscope.recordings.history.source import NO_ENGINE, Source
from stepscope.recordings.state.latency import SLO
from stepscope.tui.screens.opening import Opening
from stepscope.tui.screens.page_handlers import PageHandlers
from stepscope.tui.screens.session_screen import SessionScreen
from stepscope.tui.settings.action_table import PAGES
from stepscope.tui.settings.setting_values import said
from stepscope.tui.views import format as fmt
from stepscope.tui.views.theme import Skin, ThemeName

_PREEMPTIONS = ("preempt",)


class Handlers:
    def __init__(self, screen: SessionScreen) -> None:
        self._screen = screen
        self._session, self._view, self._notices = screen.session, screen.view, screen.notices
        self.opening = Opening(screen, self.use_levels)
        self.pages = PageHandlers(screen, self.opening)
        main = self._table()
        self.by_action = {action_id: partial(self._do, action_id, main) for action_id in main}
        self._of_comparison = self.pages.on_compare_page()

    def _do(self, action_id: str, main: Mapping[str, Callable[[], object]]) -> None:
        """Run an action. On the compare page, a handler made for that page goes first."""
        if action_id == "back" and self._session.exports.cancel():
            return
        own = self._of_comparison
        found = own if self._view.page == "compare" and action_id in own else main
        found[action_id]()

    def _table(self) -> Mapping[str, Callable[[], object]]:
        screen, session, view = self._screen, self._session, self._view
        navigator, operator = screen.navigator, screen.operator
        return {
            **{f"screen_{page}": partial(self.pages.show, page) for page in PAGES},
            "pause": navigator.pause,
            "step_back": partial(self.pages.column, -1),
            "step_forward": partial(self.pages.column, 1),
            "ten_back": partial(navigator.move, -10),
            "ten_forward": partial(navigator.move, 10),
            "screen_back": partial(self.pages.screen, -1),
            "screen_forward": partial(self.pages.screen, 1),
            "oldest": navigator.oldest,
            "live": navigator.live,
            "previous_event": partial(navigator.event, -1),
            "next_event": partial(navigator.event, 1),
            "previous_preemption": partial(navigator.event, -1, _PREEMPTIONS),
            "next_preemption": partial(navigator.event, 1, _PREEMPTIONS),
            "previous_of_request": partial(navigator.of_request, -1),
            "next_of_request": partial(navigator.of_request, 1),
            "previous_mark": navigator.mark,
            "worst": navigator.worst,
            "goto": self.opening.goto,
            "previous_session": self.previous_session,
            "slower": partial(navigator.change_speed, 0.5),
            "faster": partial(navigator.change_speed, 2.0),
            "zoom_in": partial(view.change_zoom, -1),
            "zoom_out": partial(view.change_zoom, 1),
            "axis": self.axis,
            "lane_up": partial(self.pages.select_lane, -1),
            "lane_down": partial(self.pages.select_lane, 1),
            "sort": self.pages.sort,
            "reverse": self.pages.reverse,
            "compare_with": self.pages.compare,
            "other_side": session.compare.other_side,
            "follow": self.pages.follow,
            "copy": self.pages.copy,
            "filter": self.opening.filter_,
            "service_levels": self.opening.service_levels,
            "glyphs": self.glyphs,
            "inspect": self.pages.inspect,
            "budget": self.opening.budget,
            "knobs": partial(self.opening.edit_knob, None),
            "undo": operator.undo,
            "autopilot": self.autopilot,
            "pause_engine": operator.pause_or_resume,
            "step_engine": operator.run_one_step,
            "workload": self.opening.workload,
            "record": self.record,
            "screenshot": self.screenshot,
            "keep_steps": self.opening.keep_steps,
            "mark": self.opening.mark,
            "tour_next": self._tour_next,
            "tour_again": self._tour_again,
            "help": self.opening.help_,
            "palette": self.opening.palette,
            "theme": self.theme,
            "more_frames": partial(self.frames, 1),
            "fewer_frames": partial(self.frames, -1),
            # The screen gets its application after it has been made.
            "redraw": lambda: screen.app.screen.refresh(layout=True),
            "suspend": lambda: screen.app.action_suspend_process(),  # noqa: PLW0108
            "back": self.pages.back,
            "quit": lambda: screen.app.exit(None),
        }

    def _tour_next(self) -> None:
        """Go to the next part of the tour. At a question, open the page that shows the answer."""
        tour = self._session.tour
        if tour is None:
            return
        tour.go_on()
        chapter, view = tour.chapter, self._view
        if chapter is not None and tour.page.part != "answer":
            view.show(chapter.page if tour.page.part == "question" else "live")
            view.follow()
            view.axis, view.zoom_idx = "step", 0  # undo what the person tried before

    def _tour_again(self) -> None:
        if self._session.tour is not None:
            self._session.tour.again()

    def axis(self) -> None:
        self._view.next_axis()
        self._session.prefer("axis", self._view.axis)

    def glyphs(self) -> None:
        self._screen.set_skin(Skin(self._screen.skin.mode, not self._screen.skin.ascii_only))
        self._session.prefer("ascii", self._screen.skin.ascii_only)

    def theme(self) -> None:
        mode = self._screen.skin.mode
        if mode not in ("dark", "light"):
            self._notices.warn("this terminal's own colours are used; there is no other theme")
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
        others = {each.history for each in session.fleet_view.fleet.sources}
        for history in {session.history, *others}:
            history.set_slo(slo)
        self._screen.frames.forget()
        session.prefer("slo_ttft_ms", slo.ttft_ms)
        session.prefer("slo_itl_ms", slo.itl_ms)
        self._screen.draw()

    def previous_session(self) -> None:
        current, shown = self._session.history, self._screen.history
        if shown is not current:
            self._screen.look_at(current)
        elif current.previous is None:
            self._notices.refuse("the engine has not restarted since this dashboard opened")
        elif current.previous.last_step is None:
            self._notices.refuse("no step from before the restart is known")
        else:
            self._screen.look_at(current.previous)
            key = self._session.abilities.key
            back = f"{key('previous_session')} or {key('live')} goes back"
            self._notices.say_of_place(f"the session before the restart; {back}")

    def record(self) -> None:
        """Start or stop recording this engine, or on the fleet page the engine selected there."""
        session, who = self._session, ""
        source: Source | None = session.source
        if self._view.page == "fleet":
            source, who = session.fleet_view.chosen, f"{session.fleet_view.selected}: "
        switch = None if source is None else session.switches.of(source)
        if source is None or switch is None:
            return
        if (recorder := switch.active) is not None:
            switch.stop()
            self._notices.say(f"{who}recording ended: {recorder.path}", "good")
        elif source.status in NO_ENGINE:
            self._notices.warn(f"{who}no engine answers, so nothing can be recorded")
        else:
            num_marks = len(source.history.marks)
            before = f" (without {fmt.plural(num_marks, 'earlier mark')})" if num_marks else ""
            try:
                self._notices.say(f"{who}recording{before} to {switch.start()}", "good")
            except RecordingError as error:
                self._notices.warn(f"{who}cannot record: {error}")

    def autopilot(self) -> None:
        """Start an autopilot that holds the ITL level, or end what controls the knobs."""
        switch, history = self._session.autopilot, self._session.history
        leased = history.state.leased
        if switch is None:
            return
        if switch.is_on:
            switch.stop()
            self._notices.say("ending the autopilot: it gives the knobs back")
        elif leased is not None:
            self._screen.operator.end_lease(leased)
        else:
            itl_ms = history.slo.itl_ms
            switch.start(itl_ms)
            key = self._session.abilities.key
            self._notices.say(
                f"autopilot: moves the budget so that 95 % of the gaps keep {itl_ms:g} ms "
                f"({key('service_levels')} sets that level before); {key('autopilot')} ends it",
                "good",
            )

    def screenshot(self) -> None:
        shown = "engines" if self._view.page == "fleet" else self._session.source.name
        try:
            path = new_picture(svg(self._screen.app), shown)
        except (RecordingError, OSError) as error:
            self._notices.warn(f"no screenshot: {error}")
        else:
            self._notices.say(f"screenshot: {path}", "good")


def svg(app: App[Any]) -> str:
    """Return what an application shows now, as an SVG document with selectable text."""
    document = app.export_screenshot(title=app.title, simplify=True)
    # Without this attribute, many programs other than browsers draw a run of blanks as one blank.
    return document.replace("<text ", '<text xml:space="preserve" ')


def new_picture(document: str, shown: str) -> Path:
    """Write an SVG document to a new private file, named after what is shown; return its path."""
    first = path = Path.cwd() / default_name(shown, ".svg")
    numbers = count(2)
    while path.exists():  # two pictures in one second get two names
        path = first.with_stem(f"{first.stem}-{next(numbers)}")
    with writing(path, replace=False, is_private=True) as stream:
        stream.write(document.encode())
    return path
