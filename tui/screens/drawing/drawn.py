"""`DrawnPicture`: remembers what the screen shows, to decide whether it must be redrawn."""

from collections.abc import Callable

_SLOW_S = 0.6  # between two drawings of what is read rather than watched


class DrawnPicture:
    """What one screen shows.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: object = None  # when it was drawn
        self._all_drawn_s = 0.0
        self._is_partial = False  # the slow views were left out

    @property
    def is_due(self) -> bool:
        """All of it may be drawn again."""
        return self._clock() - self._all_drawn_s >= _SLOW_S

    def is_like(self, seen: object) -> bool:
        """Whether a frame of what is seen now would be the same picture."""
        # What has changed is also shown by the views that were left out, be it the last change.
        return seen == self._seen and not (self._is_partial and self.is_due)

    def note(self, seen: object) -> None:
        """What was to be seen right before a frame was made."""
        self._seen = seen

    def note_views(self, everything: bool) -> None:
        """Which views that frame has."""
        self._is_partial = not everything
        if everything:
            self._all_drawn_s = self._clock()
