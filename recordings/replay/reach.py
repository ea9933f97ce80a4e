"""`Reach`: extends the history of a replay backwards, as far as the screen needs.

Right after a seek the history is short. Earlier steps are added when there is time.
"""

import time
from collections.abc import Callable

from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.seek import MAX_WINDOW_STEPS, WINDOW_S, WINDOW_STEPS, windows

# Sleep after every few messages, so that the drawing thread can run every millisecond or two.
_YIELD_S = 0.001
_SPARE_STEPS = 1_000  # extra steps before the step looked at, for moving back step by step


class Reach:
    """Extends the history of a replay backwards, as far as the screen needs.

    Belongs to the replay's thread, except `note_shown`, `note_look` and `has_room`.
    """

    def __init__(self, recording: Recording, history: History) -> None:
        self.is_short = False  # whether the history may not reach as far back as it should
        self.num_shown = WINDOW_STEPS  # number of steps on the screen
        self._recording = recording
        self._history = history
        self._shown_before: History | None = None  # held until there is time to free it
        self._look: int | None = None  # the step that the user looks at; None: the newest
        # The step for which it was last extended, and the first step in memory after that.
        self._tried: tuple[int, int | None] | None = None

    def note_shown(self, num_steps: int) -> bool:
        """Note how many steps are on the screen. Returns whether the history is now too short."""
        if num_steps == self.num_shown:
            return False
        self.num_shown = num_steps
        is_short = self._history.num_steps < min(num_steps, MAX_WINDOW_STEPS)
        self.is_short |= is_short
        return is_short

    def note_rewound(self) -> None:
        """Report that the history was rewound: its windows may now begin before its first step."""
        last_step = self._history.last_step
        self._history.is_short = last_step is not None and not self.covers(last_step)
        self.is_short = True  # perhaps; `extend` finds out

    def note_look(self, step: int | None) -> bool:
        """Note the step that the user looks at (None: the newest). Returns whether to extend."""
        self._look = step
        if step is None or self.is_short or self.covers(step) or not self.has_room(step):
            return False
        if self._tried is not None:
            tried, first_step = self._tried
            if step >= tried and first_step == self._history.first_step:
                return False  # the file has no more
        self._history.is_short = self.is_short = True
        return True

    def has_room(self, step: int) -> bool:
        """Whether memory has room for the windows of both `step` and the newest step.

        The windows of a step are the steps before it that charts and latencies cover.
        """
        last_step = self._history.last_step
        return last_step is not None and last_step - step <= MAX_WINDOW_STEPS

    def covers(self, step: int) -> bool:
        """Whether the history has all steps that a screen at `step` needs."""
        history, begin = self._history, self._recording.first_step or 0
        first_step = history.first_step
        if first_step is None or first_step <= max(begin, step - MAX_WINDOW_STEPS):
            return True
        if first_step > step - max(self.num_shown, WINDOW_STEPS):
            return False
        first, looked_at = history.summary(first_step), history.summary(step)
        if first is None or looked_at is None:
            return True  # one of these steps was lost
        return looked_at.tokens_ns - first.tokens_ns >= WINDOW_S * 1e9

    def show(self, fresh: History, *, is_short: bool) -> None:
        self._history.is_short = self.is_short = is_short
        self._history.adopt(fresh)
        self._shown_before = fresh

    def extend(self, end: Position, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Extend the history backwards.

        It inserts steps that the screen needs at the newest step, or at the step that the user
        looks at if memory has room for both.

        `is_wanted_elsewhere`: called now and then. If it returns true, this stops and changes
        nothing.
        """
        self._shown_before = None

        def goes_on() -> bool:
            time.sleep(_YIELD_S)
            return not is_wanted_elsewhere()

        history, last_step = self._history, self._history.last_step
        first_step, look = history.first_step, self._look
        if look is not None and not self._is_inside(look):
            look = None
        fresh = None
        if last_step is not None:
            step = last_step if look is None else max(0, look - _SPARE_STEPS)
            fresh = windows(self._recording, history, step, self.num_shown, end, goes_on)
            if fresh is None and is_wanted_elsewhere():
                return
        if fresh is not None and first_step is not None and (fresh.first_step or 0) > first_step:
            fresh = None  # memory is full before it reaches further
        if fresh is not None:
            self.show(fresh, is_short=False)
        elif history.is_short or self.is_short:
            self.is_short = False
            history.end_short()
        if look is not None:
            self._tried = look, history.first_step

    def _is_inside(self, step: int) -> bool:
        """Whether a step is in memory but not the newest, and memory has room for its windows."""
        first_step, last_step = self._history.first_step, self._history.last_step
        if first_step is None or last_step is None:
            return False
        return first_step <= step < last_step and self.has_room(step)
