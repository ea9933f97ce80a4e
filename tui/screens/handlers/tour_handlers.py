"""What the keys of the tour do."""

from stepscope.tui.session.session import Session
from stepscope.tui.views.view import View


class TourHandlers:
    """Goes through the tour of a session; without one its keys are not allowed."""

    def __init__(self, session: Session, view: View) -> None:
        self._session = session
        self._view = view

    def go_on(self) -> None:
        """To the next part. A question is asked on the screen that answers it."""
        tour = self._session.tour
        if tour is None:
            return
        tour.go_on()
        chapter, view = tour.chapter, self._view
        if chapter is not None and tour.page.part != "answer":
            view.show(chapter.page if tour.page.part == "question" else "live")
            view.follow()
            view.axis, view.zoom_idx = "step", 0  # whatever was tried before

    def again(self) -> None:
        if self._session.tour is not None:
            self._session.tour.again()
