"""Handlers of the keys that move through the lanes of requests and through lists on pages."""

from stepscope.tui.screens.handlers.compare_handlers import CompareHandlers
from stepscope.tui.screens.handlers.handled_screen import HandledScreen
from stepscope.tui.screens.handlers.page_handlers import PageHandlers

_ROWS = 10  # how far the "screen" keys move in a list


class ListHandlers:
    """The handlers of one screen for moving through lanes and lists."""

    def __init__(
        self, screen: HandledScreen, pages: PageHandlers, comparing: CompareHandlers
    ) -> None:
        self._screen = screen
        self._session, self._view, self._navigator = screen.session, screen.view, screen.navigator
        self._notices = screen.notices
        self._pages, self._comparing = pages, comparing

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
            self._pages.select(direction * _ROWS)

    def sort(self) -> None:
        if self._view.page == "fleet":
            self._session.fleet_view.move_sort(1)
        else:
            self._view.next_order()
            self._session.prefer("sort", self._view.sort)

    def reverse(self) -> None:
        """Reverse the order of the list: engines on the fleet page, else late tokens."""
        if self._view.page == "fleet":
            self._session.fleet_view.reverse()
        else:
            self._view.longest_first = not self._view.longest_first

    def select_lane(self, direction: int) -> None:
        if self._view.page != "live":
            self._pages.select(direction)
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
        if self._view.page != "live":
            self._view.leave()
            self._comparing.go_home()
            return
        if self._view.trail == ("compare",):
            self._view.leave()
            self._comparing.go_home()
            return
        if self._view.selected is None and self._view.first_lane is None:
            if len(self._session.fleet_view.fleet) > 1:
                self._pages.show("fleet")
            return
        self._view.selected = None
        self._view.first_lane = None
