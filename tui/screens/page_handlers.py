"""Handlers of the keys that open pages, and that move through lanes, lists and two compared runs.

On the compare page, keys that move in time elsewhere move the cursor of both runs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from stepscope.recordings.compare.points import PREEMPTED
from stepscope.recordings.errors import RecordingError
from stepscope.tui.screens.opening import Opening
from stepscope.tui.screens.session_screen import SessionScreen
from stepscope.tui.session.compare_state import EVENTS
from stepscope.tui.session.navigator import lane_keys
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.frame.compare_choices import Origin, file_origin, session_origin
from stepscope.tui.views.framed_panels import Target
from stepscope.tui.views.pages.page_views import targets
from stepscope.tui.views.pages.request_page import request_id_of

_ROWS = 10  # how far the "screen" keys move in a list
_KEY_FIGURES = ("header", "verdict", "figures", "latency", "latency_line")


class PageHandlers:
    """The handlers of one screen for pages, rows and compared runs."""

    def __init__(self, screen: SessionScreen, opening: Opening) -> None:
        self._screen = screen
        self._session, self._view, self._navigator = screen.session, screen.view, screen.navigator
        self._notices = screen.notices
        self._opening = opening

    @property
    def _targets(self) -> list[Target]:
        return [] if self._screen.frame is None else targets(self._screen.frame)

    def show(self, page: Page) -> None:
        """Open a page. If the live page is shown already, "live" goes to the newest step."""
        view = self._view
        if view.page == "fleet" and page != "fleet":
            self.open_engine(page)
            return
        if page == "live" and view.page == "live":
            self._navigator.follow()
        if page == "request" and view.selected is None and self._screen.frame is not None:
            # Fix the request, or another one might be shown with every step.
            view.selected = request_id_of(self._screen.frame)
        view.show(page)
        if page == "compare":
            self._session.compare.go_home()

    def open_engine(self, page: Page) -> None:
        if (chosen := self._session.fleet_view.selected) is not None:
            self._session.fleet_view.open(chosen, page)

    def select(self, direction: int) -> None:
        """Move the selection by `direction` rows."""
        view, rows = self._view, self._targets
        if view.page == "compare":
            self._session.compare.select_row(view.row + direction)
            return
        view.row = max(0, min(view.row + direction, len(rows) - 1))
        view.entry = rows[view.row] if rows else None
        if view.page == "fleet" and rows:
            self._session.fleet_view.selected = rows[view.row].engine
        if view.page == "step" and rows:
            view.selected = rows[view.row].request_id

    def inspect(self) -> None:
        """Handle Enter: open what the selected row leads to, or the request, or the step."""
        view, frame = self._view, self._screen.frame
        if view.page == "fleet":
            self.open_engine("live")
            return
        if frame is None or frame.cursor is None:
            return
        if view.page == "live":
            there = {*frame.state.requests, *(row.request_id for row in frame.lanes)}
            self.show("request" if view.selected in there else "step")
            return
        rows = self._targets
        if view.row >= len(rows):
            self._notices.warn("no row is selected")
            return
        target = rows[view.row]
        if target.knob is not None:
            self.edit(target.knob)
        elif view.page in ("step", "kv"):
            view.selected = target.request_id
            view.show("request")
        elif target.step is not None:
            if target.request_id is not None:
                view.selected = target.request_id
            self._navigator.go(target.step)
            view.show("live" if view.page == "knobs" else "step")

    def edit(self, name: str) -> None:
        abilities = self._session.abilities
        action = abilities.action("knobs")
        if abilities.allows(action):
            self._opening.edit_knob(name)
        else:
            self._notices.refuse(abilities.why_not(action))

    def follow(self) -> None:
        """Follow the selected request, so that it always has a lane; if it is followed, stop."""
        view, key = self._view, self._session.abilities.key
        if view.followed is not None and view.selected in (None, view.followed):
            self._notices.say(f"r{view.followed} is no longer followed")
            view.followed = None
            return
        if view.selected is None:
            self._notices.warn(f"select a request first ({lane_keys(key)})")
            return
        view.followed = view.selected
        self._notices.say(
            f"r{view.followed} is followed; {key('previous_of_request')} and "
            f"{key('next_of_request')} go to its steps, {key('follow')} stops",
            "good",
        )

    def copy(self) -> None:
        names: tuple[str, ...] = ("page",)
        what, canvas = "this screen", self._screen.canvas
        if self._view.page == "live":
            names, what = _KEY_FIGURES, "the key figures"
        shown = canvas.text_of(*(name for name in names if name in canvas.places))
        self._screen.app.copy_to_clipboard("\n".join(map(str.rstrip, shown)).strip())
        self._notices.say(f"{what} sent to the terminal's clipboard (if it takes OSC 52)", "good")

    def column(self, direction: int) -> None:
        """Move the cursor by one column; on the fleet page, sort the engines by the next column."""
        if self._view.page == "fleet":
            self._session.fleet_view.move_sort(direction)
        else:
            self._navigator.move(direction)

    def screen(self, direction: int) -> None:
        """Move the cursor by one screen in time; in a list, move the selection by ten rows."""
        if self._view.page == "live":
            self._navigator.move_screen(direction)
        else:
            self.select(direction * _ROWS)

    def sort(self) -> None:
        if self._view.page == "fleet":
            self._session.fleet_view.move_sort(1)
        else:
            frame = self._screen.frame
            has_groups = frame is not None and frame.state.block_groups is not None
            self._view.next_order(has_groups=has_groups)
            self._session.prefer("sort", self._view.sort)

    def reverse(self) -> None:
        """Reverse the order of the list: engines on the fleet page, else late tokens."""
        if self._view.page == "fleet":
            self._session.fleet_view.reverse()
        else:
            self._view.longest_first = not self._view.longest_first

    def select_lane(self, direction: int) -> None:
        if self._view.page != "live":
            self.select(direction)
            return
        frame, view = self._screen.frame, self._view
        ids = [] if frame is None else [row.request_id for row in frame.lanes]
        at = ids.index(view.selected) + direction if view.selected in ids else None
        if at is None:
            view.selected = ids[0 if direction > 0 else -1] if ids else view.selected
        elif 0 <= at < len(ids):
            view.selected = ids[at]
        elif frame is not None:
            view.scroll_lanes(direction, frame.num_lanes)
            if shown := self._screen.new_frame().lanes:
                view.selected = shown[-1 if direction > 0 else 0].request_id

    def back(self) -> None:
        self._notices.dismiss()
        self._session.background_error = None
        if self._view.page != "live" or self._view.trail == ("compare",):
            self._view.leave()
            if self._view.page == "compare":  # the screen of the session that opened it
                self._session.compare.go_home()
        elif self._view.selected is not None or self._view.first_lane is not None:
            self._view.selected = self._view.first_lane = None
        elif len(self._session.fleet_view.fleet) > 1:
            self.show("fleet")

    def on_compare_page(self) -> Mapping[str, Callable[[], None]]:
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
            "previous_event": partial(self._compare_event, -1, EVENTS),
            "next_event": partial(self._compare_event, 1, EVENTS),
            "previous_preemption": partial(self._compare_event, -1, PREEMPTED),
            "next_preemption": partial(self._compare_event, 1, PREEMPTED),
            "zoom_in": partial(state.zoom, 1),
            "zoom_out": partial(state.zoom, -1),
            "lane_up": partial(self._select_pair, -1),
            "lane_down": partial(self._select_pair, 1),
            "sort": state.next_align,
            "inspect": self._inspect_side,
            "back": self._leave_comparison,
        }

    def compare(self) -> None:
        self._session.compare.chooser.open(self._session.source)
        self.show("compare")

    def _compare_event(self, direction: int, flags: int) -> None:
        if not self._session.compare.event(direction, flags):
            what = "preemption" if flags == PREEMPTED else "event"
            where = "after" if direction > 0 else "before"
            self._notices.warn(f"no {what} {where} the cursor on either side")

    def _select_pair(self, direction: int) -> None:
        state = self._session.compare
        if state.chooser.choices is not None or state.align == "request":
            state.select(direction)
        else:
            key = self._session.abilities.key("sort")
            self._notices.warn(f"press {key} to align by request; then these keys choose a request")

    def _leave_comparison(self) -> None:
        self._notices.dismiss()
        if not self._session.compare.back():
            self._view.leave()

    def _inspect_side(self) -> None:
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
        choice, session = self._session.compare.chooser.chosen, session_origin(self._session.source)

        def use(text: str) -> None:
            if text.strip():
                self._begin(session, file_origin(Path(text.strip()).expanduser(), session))

        if choice is not None and choice.origins is not None:
            self._begin(*choice.origins)
        elif choice is not None:
            self._opening.ask("compare with this recording:", use, _no_such_file)

    def _begin(self, a: Origin, b: Origin) -> None:
        self._try(partial(self._session.compare.begin, a, b))

    def _try(self, act: Callable[[], None]) -> None:
        """Open or begin something; if a recording cannot be read, show a notice."""
        try:
            act()
        except (RecordingError, OSError) as error:
            self._notices.warn(str(error))


def _no_such_file(text: str) -> str | None:
    path = Path(text.strip()).expanduser()
    return None if not text.strip() or path.is_file() else f"there is no file {path}"
