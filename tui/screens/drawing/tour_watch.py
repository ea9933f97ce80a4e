"""`TourWatch`: stops the picture where the guided tour wants it, and notes what was tried."""

from collections.abc import Iterator, Mapping

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.history.history import History
from stepscope.tui.session.session import Session
from stepscope.tui.session.tour.chapters import SMALL, Try
from stepscope.tui.views.view import View


class TourWatch:
    """Checks before each picture of a tour what the person has tried of its suggestions."""

    def __init__(self, session: Session, view: View) -> None:
        self._session = session
        self._view = view

    def look(self, history: History) -> None:
        tour = self._session.tour
        if tour is None:
            return
        if tour.wants_hold:
            self._hold(history)
        tour.note(tried(self._view, history.state.knobs, tour.held_step))

    def _hold(self, history: History) -> None:
        """Stop the picture one step before the step in which the chapter's last prompt ended."""
        tour, view = self._session.tour, self._view
        request_id, last = (None if tour is None else tour.ended()), history.last_step
        if tour is None or request_id is None or last is None:
            return
        if (end := history.end_of(request_id, last)) is not None:
            # One step earlier, the request still has its KV blocks.
            tour.held_step = view.cursor = view.right = max(history.first_step or 0, end.step - 1)
            view.selected = request_id


def tried(
    view: View, knobs: Mapping[str, KnobValue], held_step: int | None = None
) -> Iterator[Try]:
    """Yield each suggestion of the tour that is done; it stopped the picture at `held_step`."""
    if view.cursor != held_step:
        yield "time"
    if view.page == "request":
        yield "request"
    if knobs.get("max_num_batched_tokens", SMALL) != SMALL:
        yield "budget"
    if view.zoom_idx or view.axis == "time":
        yield "columns"
    if view.kv_map == "owner":
        yield "owners"
    if view.page != "latency":
        yield "leave"
