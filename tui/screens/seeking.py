"""`Seeking`: while a replay seeks, the picture waits for what it finds."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.timer import Timer

from stepscope.tui.navigator import Replay

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen

_FOUND_S = 0.005  # between two looks whether it has found its step
_PATIENCE_S = 0.1  # the picture stands still for what is about to be found


class Seeking:
    """Draws a screen as soon as its replay has found what it was sent to.

    Args:
        replay: None for a live source, which never seeks.
        clock: seconds.
    """

    def __init__(
        self, screen: "MainScreen", replay: Replay | None, clock: Callable[[], float]
    ) -> None:
        self._screen = screen
        self._replay = replay
        self._clock = clock
        self._timer: Timer | None = None
        self._since_s = 0.0

    def has_begun(self) -> bool:
        """Whether the replay seeks; if so, the screen is drawn when it has found its step."""
        if self._replay is None or not self._replay.is_seeking:
            return False
        if self._timer is None:
            self._since_s = self._clock()
            self._timer = self._screen.set_interval(_FOUND_S, self._look)
        return True

    @property
    def is_about_to_end(self) -> bool:
        """A picture of where the replay was would only hold up the one that is wanted."""
        return self._timer is not None and self._clock() - self._since_s < _PATIENCE_S

    def _look(self) -> None:
        if self._timer is not None and not (self._replay and self._replay.is_seeking):
            self._timer.stop()
            self._timer = None
            self._screen.draw()
