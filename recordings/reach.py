"""`Reach`: how far back the history of a replay reaches, and making it reach as far as it should.

What is shown after a seek is short: the steps before it are filled in when there is time.
"""

import time
from collections.abc import Callable

from stepscope.recordings.excerpt import screenful, windows
from stepscope.recordings.history import History
from stepscope.recordings.reader import Position, Recording
from stepscope.recordings.seek import MAX_WINDOW_STEPS, WINDOW_STEPS

# Whoever draws gets the interpreter every millisecond or two.
_YIELD_S = 0.001


class Reach:
    """Belongs to the thread of the replay, but for `note_shown`.

    Attributes:
        is_short: the history may not reach as far back as it should.
        num_shown: steps on the screen.
    """

    def __init__(self, recording: Recording, history: History) -> None:
        self.is_short = False
        self.num_shown = WINDOW_STEPS
        self._recording = recording
        self._history = history
        self._shown_before: History | None = None  # freed when there is time for that

    def note_shown(self, num_steps: int) -> bool:
        """So many steps are on the screen; whether the history has become too short by that."""
        if num_steps == self.num_shown:
            return False
        self.num_shown = num_steps
        is_short = self._history.num_steps < min(num_steps, MAX_WINDOW_STEPS)
        self.is_short |= is_short
        return is_short

    def show(self, fresh: History, *, is_short: bool) -> None:
        """Another history instead of what is shown."""
        self._history.is_short = self.is_short = is_short
        self._history.adopt(fresh)
        self._shown_before = fresh

    def extend(self, end: Position, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Reach as far back as it should, first to the steps on the screen.

        Args:
            end: where the replay stands.
            is_wanted_elsewhere: asked now and then; then it is left as it is.
        """
        self._shown_before = None

        def goes_on() -> bool:
            time.sleep(_YIELD_S)
            return not is_wanted_elsewhere()

        history, last_step = self._history, self._history.last_step
        fresh, is_short = None, False
        if last_step is not None:
            where = self._recording, history, last_step, self.num_shown, end
            fresh = screenful(*where, goes_on)
            is_short = fresh is not None
            if fresh is None and not is_wanted_elsewhere():
                fresh = windows(*where, goes_on)
            if fresh is None and is_wanted_elsewhere():
                return
        if fresh is None:
            history.is_short = self.is_short = False
        else:
            self.show(fresh, is_short=is_short)
