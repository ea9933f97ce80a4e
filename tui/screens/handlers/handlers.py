"""The handlers of all actions on the main screen."""

from collections.abc import Callable, Mapping
from functools import partial

from stepscope.tui.screens.handlers.compare_handlers import CompareHandlers
from stepscope.tui.screens.handlers.handled_screen import HandledScreen
from stepscope.tui.screens.handlers.look_handlers import LookHandlers
from stepscope.tui.screens.handlers.opening import Opening
from stepscope.tui.screens.handlers.page_handlers import ListHandlers, PageHandlers
from stepscope.tui.screens.handlers.session_handlers import SessionHandlers
from stepscope.tui.session.time.navigator import replay_of
from stepscope.tui.session.time.worst import WorstStalls
from stepscope.tui.settings.page_names import PAGES

_PREEMPTIONS = ("preempt",)


class Handlers:
    """All handlers of one screen, in groups."""

    def __init__(self, screen: HandledScreen) -> None:
        self._screen = screen
        self._session, self._view = screen.session, screen.view
        self._looks = LookHandlers(screen)
        self.opening = Opening(screen, self._looks.use_levels)
        self.pages = PageHandlers(screen, self.opening.edit_knob)
        self._comparing = CompareHandlers(screen, self.pages.show)
        self._lists = ListHandlers(screen, self.pages, self._comparing)
        self._sessions = SessionHandlers(screen)
        self._worst = WorstStalls(
            screen.navigator,
            lambda: screen.history,
            replay_of(screen.session.source),
            screen.notices,
            self._key,
        )
        main = self._table()
        self.by_action = {action_id: partial(self._do, action_id, main) for action_id in main}
        self._of_comparison = self._comparing.handlers()

    def _key(self, action_id: str) -> str:
        return self._session.abilities.key(action_id)

    def _do(self, action_id: str, main: Mapping[str, Callable[[], None]]) -> None:
        """Run an action. On the compare page, a handler made for that page goes first."""
        if action_id == "back" and self._session.exports.cancel():
            return
        own = self._of_comparison
        found = own if self._view.page == "compare" and action_id in own else main
        found[action_id]()

    def _table(self) -> Mapping[str, Callable[[], None]]:
        screen, session, view = self._screen, self._session, self._view
        navigator, operator = screen.navigator, screen.operator
        return {
            **{f"screen_{page}": partial(self.pages.show, page) for page in PAGES},
            "pause": navigator.pause,
            "step_back": partial(self._lists.column, -1),
            "step_forward": partial(self._lists.column, 1),
            "ten_back": partial(navigator.move, -10),
            "ten_forward": partial(navigator.move, 10),
            "screen_back": partial(self._lists.screen, -1),
            "screen_forward": partial(self._lists.screen, 1),
            "oldest": navigator.oldest,
            "live": navigator.live,
            "previous_event": partial(navigator.event, -1),
            "next_event": partial(navigator.event, 1),
            "previous_preemption": partial(navigator.event, -1, _PREEMPTIONS),
            "next_preemption": partial(navigator.event, 1, _PREEMPTIONS),
            "previous_of_request": partial(navigator.of_request, -1),
            "next_of_request": partial(navigator.of_request, 1),
            "previous_mark": navigator.mark,
            "worst": self._worst.next,
            "goto": self.opening.goto,
            "previous_session": self._sessions.previous_session,
            "slower": partial(navigator.change_speed, 0.5),
            "faster": partial(navigator.change_speed, 2.0),
            "zoom_in": partial(view.change_zoom, -1),
            "zoom_out": partial(view.change_zoom, 1),
            "axis": self._looks.axis,
            "lane_up": partial(self._lists.select_lane, -1),
            "lane_down": partial(self._lists.select_lane, 1),
            "sort": self._lists.sort,
            "reverse": self._lists.reverse,
            "compare_with": self._comparing.choose,
            "other_side": session.compare.other_side,
            "follow": self.pages.follow,
            "copy": self.pages.copy,
            "filter": self.opening.filter_,
            "service_levels": self.opening.service_levels,
            "glyphs": self._looks.glyphs,
            "inspect": self.pages.inspect,
            "budget": self.opening.budget,
            "knobs": self.opening.knobs,
            "undo": operator.undo,
            "autopilot": self._sessions.autopilot,
            "pause_engine": operator.pause_or_resume,
            "step_engine": operator.run_one_step,
            "workload": self.opening.workload,
            "record": self._sessions.record,
            "screenshot": self._sessions.screenshot,
            "export": self.opening.export,
            "keep_steps": self.opening.keep_steps,
            "mark": self.opening.mark,
            "tour_next": self._tour_next,
            "tour_again": self._tour_again,
            "help": self.opening.help_,
            "palette": self.opening.palette,
            "theme": self._looks.theme,
            "more_frames": partial(self._looks.frames, 1),
            "fewer_frames": partial(self._looks.frames, -1),
            "redraw": self._redraw,
            "suspend": self._suspend,
            "back": self._lists.back,
            "quit": self._quit,
        }

    # The screen gets its application after it has been made.

    def _redraw(self) -> None:
        self._screen.app.screen.refresh(layout=True)

    def _suspend(self) -> None:
        self._screen.app.action_suspend_process()

    def _quit(self) -> None:
        self._screen.app.exit()

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
