"""Handlers of the keys that move through the guided tour."""

from stepscope.tui.session.session import Session
from stepscope.tui.views.view import View


class TourHandlers:
    """Moves through the tour of a session. Without a tour, its keys are disabled."""

    def __init__(self, session: Session, view: View) -> None:
        self._session = session
        self._view = view

    def go_on(self) -> None:
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

    def again(self) -> None:
        if self._session.tour is not None:
            self._session.tour.again()
