"""`Seeking`: delays drawing while a replay seeks a step in its file.

Until the step is found, the screen would show the old step.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

_PATIENCE_S = 0.1  # how long the picture stands still for the step that is being sought


class Seeking:
    """Draws a screen, on its own thread, as soon as its replay has found the step that it seeks."""

    def __init__(
        self,
        replay: "ReplaySource | None",
        clock: Callable[[], float],
        draw: Callable[[], None],
        call_later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._draw = draw
        self._call_later = call_later
        self._replay = replay
        self._clock = clock
        self._since_s: float | None = None  # when the seek began; None while there is none

    def has_begun(self) -> bool:
        """Whether the replay is seeking a step; if so, the screen is drawn once it is found."""
        if self._since_s is None and self._replay is not None and self._seeks():
            self._replay.on_found = self._found
            if self._seeks():  # it may have found the step before we set the callback
                self._since_s = self._clock()
        return self._since_s is not None and self._seeks()

    @property
    def is_about_to_end(self) -> bool:
        """Whether a seek has just begun: the old step would only delay the new one."""
        return self._since_s is not None and self._clock() - self._since_s < _PATIENCE_S

    def _found(self) -> None:
        """Called on the replay's thread when the step is found; draws on the screen's thread."""
        with contextlib.suppress(RuntimeError):  # the dashboard has just ended
            self._call_later(self._look)

    def _look(self) -> None:
        if self._since_s is not None and not self._seeks():
            self._since_s = None
            self._draw()

    def _seeks(self) -> bool:
        return self._replay is not None and self._replay.is_seeking
