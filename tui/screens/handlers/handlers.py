"""The handlers of all actions on the main screen."""

from collections.abc import Callable, Mapping
from functools import partial

from textual.app import App

from stepscope.tui.screens.handlers.compare_handlers import CompareHandlers
from stepscope.tui.screens.handlers.list_handlers import ListHandlers
from stepscope.tui.screens.handlers.look_handlers import LookHandlers
from stepscope.tui.screens.handlers.opening import Opening
from stepscope.tui.screens.handlers.page_handlers import PageHandlers
from stepscope.tui.screens.handlers.session_handlers import SessionHandlers
from stepscope.tui.screens.handlers.stage import Looks, Stage
from stepscope.tui.screens.handlers.svg_picture import svg
from stepscope.tui.screens.handlers.tour_handlers import TourHandlers
from stepscope.tui.session.control.operator import Operator
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import Navigator, replay_of
from stepscope.tui.session.time.worst import WorstStalls
from stepscope.tui.settings.page_names import PAGES
from stepscope.tui.views.notices import Notices
from stepscope.tui.views.view import View

_PREEMPTIONS = ("preempt",)


class Handlers:
    """All handlers of one screen.

    They are divided into groups, each of which gets only the objects it acts on.

    Args:
        forget: drops figures computed for other service levels.
        app: returns the application; call it only once a key is pressed.
    """

    def __init__(
        self,
        session: Session,
        view: View,
        navigator: Navigator,
        operator: Operator,
        notices: Notices,
        stage: Stage,
        looks: Looks,
        forget: Callable[[], None],
        app: Callable[[], App[object]],
    ) -> None:
        self._session = session
        self._view = view
        self._looks = LookHandlers(session, view, notices, looks, forget)
        self.opening = Opening(
            session, view, navigator, operator, notices, stage, self._looks.use_levels
        )
        self.pages = PageHandlers(
            session,
            view,
            navigator,
            notices,
            stage,
            self.opening.edit_knob,
            lambda text: app().copy_to_clipboard(text),
        )
        self._comparing = CompareHandlers(session, view, notices, stage, self.pages.show)
        self._lists = ListHandlers(
            session, view, navigator, notices, stage, self.pages, self._comparing
        )
        self._sessions = SessionHandlers(
            session, view, notices, stage, operator, lambda: svg(app())
        )
        self._worst = WorstStalls(
            navigator,
            lambda: stage.history,
            replay_of(session.source),
            notices,
            self._key,
        )
        main = self._table(navigator, operator, app)
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

    def _table(
        self, navigator: Navigator, operator: Operator, app: Callable[[], App[object]]
    ) -> Mapping[str, Callable[[], None]]:
        """Return action id -> handler, for every action in the table."""
        session, view = self._session, self._view
        tour = TourHandlers(session, view)
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
            "tour_next": tour.go_on,
            "tour_again": tour.again,
            "help": self.opening.help_,
            "palette": self.opening.palette,
            "theme": self._looks.theme,
            "more_frames": partial(self._looks.frames, 1),
            "fewer_frames": partial(self._looks.frames, -1),
            "redraw": partial(_redraw, app),
            "suspend": lambda: app().action_suspend_process(),
            "back": self._lists.back,
            "quit": lambda: app().exit(),
        }


def _redraw(app: Callable[[], App[object]]) -> None:
    app().screen.refresh(layout=True)
