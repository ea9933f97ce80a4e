"""Handlers of the keys that open pages, and that move through lanes of requests and lists."""

from collections.abc import Callable

from stepscope.tui.screens.drawing.session_screen import SessionScreen
from stepscope.tui.session.time.navigator import lane_keys
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.framed_panels import Target
from stepscope.tui.views.pages.page_views import targets
from stepscope.tui.views.pages.request_page import request_id_of

_ROWS = 10  # how far the "screen" keys move in a list


class PageHandlers:
    """The handlers of one screen for pages and rows; `edit_knob` opens the editor at a knob."""

    def __init__(self, screen: SessionScreen, edit_knob: Callable[[str], None]) -> None:
        self._screen = screen
        self._session, self._view, self._navigator = screen.session, screen.view, screen.navigator
        self._notices = screen.notices
        self._edit_knob = edit_knob

    def show(self, page: Page) -> None:
        """Open a page. If the live page is shown already, "live" goes to the newest step."""
        view = self._view
        if view.page == "fleet" and page != "fleet":
            self.open_engine(page)
            return
        if page == "compare":
            view.show(page)
            self._session.compare.go_home()
            return
        if page == "live" and view.page == "live":
            self._navigator.follow()
        if page == "request" and view.selected is None and self._screen.frame is not None:
            # Fix the request, or another one might be shown with every step.
            view.selected = request_id_of(self._screen.frame)
        view.show(page)

    def open_engine(self, page: Page) -> None:
        chosen_engine = self._session.fleet_view.selected
        if chosen_engine is not None:
            self._session.fleet_view.open(chosen_engine, page)

    def select(self, direction: int) -> None:
        """Move the selection by `direction` rows."""
        view = self._view
        if view.page == "compare":
            self._session.compare.select_row(view.row + direction)
            return
        rows = targets(self._screen.frame) if self._screen.frame is not None else []
        view.row = max(0, min(view.row + direction, len(rows) - 1))
        view.entry = rows[view.row] if rows else None
        if view.page == "fleet" and rows:
            self._session.fleet_view.selected = rows[view.row].engine
        if view.page == "step" and rows:
            view.selected = rows[view.row].request_id

    def chosen(self) -> Target | None:
        """Return the target of the selected row: a step, a request, a knob or an engine."""
        rows = targets(self._screen.frame) if self._screen.frame is not None else []
        return rows[self._view.row] if self._view.row < len(rows) else None

    def inspect(self) -> None:
        """Handle Enter: open what the selected row leads to, or the request, or the step."""
        view, frame = self._view, self._screen.frame
        if view.page == "fleet":
            self.open_engine("live")
            return
        if frame is None or frame.cursor is None:
            return
        if view.page == "live":
            self.show("step" if view.selected is None else "request")
            return
        target = self.chosen()
        if target is None:
            self._notices.warn("no row is selected")
        elif target.knob is not None:
            self.edit(target.knob)
        elif view.page in ("step", "kv"):
            view.selected = target.request_id
            view.show("request")
        elif target.step is not None:
            if target.request_id is not None:
                view.selected = target.request_id
            self._navigator.go(target.step)
            view.show("live" if view.page == "knobs" else "step")
            self._find_row(target.request_id)

    def _find_row(self, request_id: int | None) -> None:
        rows = targets(self._screen.new_frame())
        for number, target in enumerate(rows):
            if request_id is not None and target.request_id == request_id:
                self._view.row = number
                return

    def edit(self, name: str) -> None:
        abilities = self._session.abilities
        action = abilities.action("knobs")
        if abilities.allows(action):
            self._edit_knob(name)
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
        is_live, canvas = self._view.page == "live", self._screen.canvas
        wanted = (
            ("header", "verdict", "figures", "latency", "latency_line") if is_live else ("page",)
        )
        names = (name for name in wanted if name in canvas.places)
        text = "\n".join(line.rstrip() for line in canvas.text_of(*names))
        self._screen.app.copy_to_clipboard(text.strip())
        what = "the key figures" if is_live else "this screen"
        self._notices.say(f"{what} sent to the terminal's clipboard (if it takes OSC 52)", "good")

    # Lanes and lists

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
        rows = self._screen.frame.lanes if self._screen.frame is not None else []
        if not rows:
            return
        ids = [row.request_id for row in rows]
        selected = self._view.selected
        if selected not in ids:
            self._view.selected = ids[0] if direction > 0 else ids[-1]
            return
        at = ids.index(selected) + direction
        if 0 <= at < len(ids):
            self._view.selected = ids[at]
        else:
            self._view.scroll_lanes(direction, self._screen.num_lanes)
            shown = self._screen.new_frame().lanes
            if shown:
                self._view.selected = shown[-1 if direction > 0 else 0].request_id

    def back(self) -> None:
        self._notices.dismiss()
        self._session.background_error = None
        if self._view.page != "live" or self._view.trail == ("compare",):
            self._view.leave()
            if self._view.page == "compare":  # the screen of the session that opened it
                self._session.compare.go_home()
            return
        if self._view.selected is None and self._view.first_lane is None:
            if len(self._session.fleet_view.fleet) > 1:
                self.show("fleet")
            return
        self._view.selected = None
        self._view.first_lane = None
