"""`DrawnPicture`: remembers what the screen shows, to decide whether it must be redrawn."""

from collections.abc import Callable

_SLOW_S = 0.6  # between two drawings of the slow views, which are read rather than watched


class DrawnPicture:
    """Remembers from which data one screen was drawn last, and when.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: object = None  # the state of the session when it was drawn
        self._all_drawn_s = 0.0
        self._is_partial = False  # the slow views were left out

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw the slow views again.

        The slow views are those that are not drawn in every frame.
        """
        return self._clock() - self._all_drawn_s >= _SLOW_S

    def is_like(self, seen: object) -> bool:
        """Whether a frame drawn now would look the same as the last one.

        Args:
            seen: the state that the frame would be drawn from; see `status.seen`.
        """
        # The slow views must show the last change too: after a partial frame, draw once more.
        return seen == self._seen and not (self._is_partial and self.is_due)

    def note(self, seen: object) -> None:
        """Store the state that the next frame is drawn from. Call this right before drawing."""
        self._seen = seen

    def note_views(self, everything: bool) -> None:
        """Store whether the frame now drawn has all views (`everything`), or only the fast ones."""
        self._is_partial = not everything
        if everything:
            self._all_drawn_s = self._clock()
