"""Handlers of the actions on the compare page, which shows two runs side by side.

Keys that move in time elsewhere move the cursor of both runs here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from stepscope.recordings.compare.side.points import PREEMPTED
from stepscope.recordings.errors import RecordingError
from stepscope.tui.screens.drawing.session_screen import SessionScreen
from stepscope.tui.session.compare_state import EVENTS
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.frame.compare_choices import Origin, file_origin, session_origin


class CompareHandlers:
    """The handlers of the compare page of one screen; `show` opens a page, `ask` a prompt."""

    def __init__(
        self, screen: SessionScreen, show: Callable[[Page], None], ask: Callable[..., None]
    ) -> None:
        self._screen = screen
        self._session, self._view, self._notices = screen.session, screen.view, screen.notices
        self._show, self._ask = show, ask

    def handlers(self) -> Mapping[str, Callable[[], None]]:
        """Return action id -> handler, for the actions that differ on the compare page."""
        state = self._session.compare
        return {
            "step_back": partial(state.move, -1),
            "step_forward": partial(state.move, 1),
            "ten_back": partial(state.move, -10),
            "ten_forward": partial(state.move, 10),
            "screen_back": partial(state.move_screen, -1),
            "screen_forward": partial(state.move_screen, 1),
            "oldest": partial(state.go_to_end, -1),
            "live": partial(state.go_to_end, 1),
            "previous_event": partial(self._event, -1, EVENTS),
            "next_event": partial(self._event, 1, EVENTS),
            "previous_preemption": partial(self._event, -1, PREEMPTED),
            "next_preemption": partial(self._event, 1, PREEMPTED),
            "zoom_in": partial(state.zoom, 1),
            "zoom_out": partial(state.zoom, -1),
            "lane_up": partial(self._select, -1),
            "lane_down": partial(self._select, 1),
            "sort": state.next_align,
            "inspect": self._inspect,
            "back": self._back,
        }

    def choose(self) -> None:
        self._session.compare.chooser.open(self._session.source)
        self._show("compare")

    def _event(self, direction: int, flags: int) -> None:
        if not self._session.compare.event(direction, flags):
            what = "preemption" if flags == PREEMPTED else "event"
            where = "after" if direction > 0 else "before"
            self._notices.warn(f"no {what} {where} the cursor on either side")

    def _select(self, direction: int) -> None:
        state = self._session.compare
        if state.chooser.choices is not None or state.align == "request":
            state.select(direction)
        else:
            key = self._session.abilities.key("sort")
            self._notices.warn(f"press {key} to align by request; then these keys choose a request")

    def _back(self) -> None:
        self._notices.dismiss()
        if not self._session.compare.back():
            self._view.leave()

    def _inspect(self) -> None:
        state = self._session.compare
        if state.chooser.choices is not None:
            self._begin_chosen()
        elif state.align == "request" and state.pairs:
            pair = state.pairs[min(state.selected, len(state.pairs) - 1)]
            run = pair.a if state.focus == "a" else pair.b
            step = run.first_token_step if run.worst_step is None else run.worst_step
            self._open(step, run.request_id)
        else:
            page = None if self._screen.frame is None else self._screen.frame.compare
            point = None if page is None else page.points[0 if state.focus == "a" else 1]
            if point is None:
                self._notices.warn(f"{state.focus.upper()} has no step here")
            else:
                self._open(point.first, None)

    def _open(self, step: int | None, request_id: int | None) -> None:
        state = self._session.compare
        if state.origins is not None:
            side = state.origins[0 if state.focus == "a" else 1]
            self._try(partial(state.open, side, step, request_id))

    def _begin_chosen(self) -> None:
        choice = self._session.compare.chooser.chosen
        if choice is None:
            return
        if choice.origins is not None:
            self.begin(*choice.origins)
            return
        session = session_origin(self._session.source)

        def use(text: str) -> None:
            if text.strip():
                self.begin(session, file_origin(Path(text.strip()).expanduser(), session))

        self._ask("compare with this recording:", use, _no_such_file)

    def begin(self, a: Origin, b: Origin) -> None:
        """Start to compare these two runs; if one cannot be read, show a notice."""
        self._try(partial(self._session.compare.begin, a, b))

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (RecordingError, OSError) as error:
            self._notices.warn(str(error))


def _no_such_file(text: str) -> str | None:
    path = Path(text.strip()).expanduser()
    return None if not text.strip() or path.is_file() else f"there is no file {path}"
