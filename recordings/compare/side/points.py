"""`StepPoints`: numbers of the steps of a run for charts, in bounded memory.

A point is one step. Beyond `MAX_POINTS` steps, a point is the maximum over two steps, then over
four, and so on. A point takes about 50 bytes, so a run of any length takes at most 25 MB.
"""

from array import array
from bisect import bisect_right
from typing import NamedTuple

MAX_POINTS = 1 << 19
UNKNOWN = -1
PREEMPTED, KNOB, MARKED, LATE, LOST = 1, 2, 4, 8, 16  # flags
_MOST = (1 << 31) - 1


class StepPoint(NamedTuple):
    """Maxima over the steps `first` to `last` of a run. Times count from the start of the run."""

    first: int
    last: int
    start_ns: int
    end_ns: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    token_budget: int | None
    num_rows: int | None
    num_waiting: int
    longest_us: int | None  # longest ITL wait that ended here
    duration_us: int
    flags: int


class StepPoints:
    """The points of a run in columns, one entry per point.

    One thread writes; readers must hold its lock.
    """

    def __init__(self) -> None:
        self.steps_per_point = 1
        self.num_steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._in_last = 0  # steps in the last point
        self._first = array("q")
        self._last = array("q")
        self._start = array("q")
        self._end = array("q")
        self._numbers = tuple(array("i") for _ in range(7))
        self._flags = array("B")

    def __len__(self) -> int:
        return len(self._first)

    @property
    def end_ns(self) -> int:
        """When the last step ended, in nanoseconds since the start of the run."""
        return self._end[-1] if self._end else 0

    def append(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        prefill: int,
        decode: int,
        budget: int | None,
        rows: int | None,
        waiting: int,
        longest_ns: int | None,
        flags: int,
    ) -> None:
        """Add a step, which must be later than the last one."""
        if self.first_step is None:
            self.first_step = step
        self.last_step = step
        self.num_steps += 1
        longest = UNKNOWN if longest_ns is None else longest_ns // 1000
        numbers = (
            prefill,
            decode,
            UNKNOWN if budget is None else budget,
            UNKNOWN if rows is None else rows,
            waiting,
            longest,
            (end_ns - start_ns) // 1000,
        )
        if 0 < self._in_last < self.steps_per_point:
            self._in_last += 1
            self._last[-1], self._end[-1] = step, end_ns
            for column, value in zip(self._numbers, numbers, strict=True):
                column[-1] = min(_MOST, max(column[-1], value))
            if budget is not None:
                self._numbers[2][-1] = min(_MOST, budget)
            self._flags[-1] |= flags
            return
        if len(self._first) >= MAX_POINTS:
            self._fold()
        self._in_last = 1
        self._first.append(step)
        self._last.append(step)
        self._start.append(start_ns)
        self._end.append(end_ns)
        for column, value in zip(self._numbers, numbers, strict=True):
            column.append(max(UNKNOWN, min(_MOST, value)))
        self._flags.append(flags)

    def flag(self, step: int, flag: int) -> None:
        """Set a flag on the point that contains a step, or on the nearest point before it."""
        index = bisect_right(self._first, step) - 1
        if index >= 0:
            self._flags[index] |= flag

    # Finding

    def index_of_step(self, step: int) -> int:
        """Index of the last point that begins at or before `step`; -1 before the first."""
        return bisect_right(self._first, step) - 1

    def index_at(self, time_ns: int) -> int:
        """Index of the last point that begins at or before a time; -1 before the first."""
        return bisect_right(self._start, time_ns) - 1

    def index_ended(self, time_ns: int) -> int:
        """Index of the last point that has ended by a time; -1 if none has."""
        return bisect_right(self._end, time_ns) - 1

    def worst(self, first: int, last: int) -> StepPoint | None:
        """Maxima over the points with these indices; None if there are none."""
        first, last = max(0, first), min(last, len(self._first) - 1)
        if first > last:
            return None
        cut = slice(first, last + 1)
        prefill, decode, budget, rows, waiting, longest, duration = (
            max(column[cut]) for column in self._numbers
        )
        flags = 0
        for flag in set(self._flags[cut]):
            flags |= flag
        return StepPoint(
            self._first[first],
            self._last[last],
            self._start[first],
            self._end[last],
            (last - first + 1) * self.steps_per_point,
            prefill,
            decode,
            None if budget == UNKNOWN else self._numbers[2][last],
            None if rows == UNKNOWN else rows,
            waiting,
            None if longest == UNKNOWN else longest,
            duration,
            flags,
        )

    def next_flagged(self, index: int, direction: int, flags: int) -> int | None:
        """Index of the nearest point with any of these flags, after (1) or before (-1) `index`."""
        at = index + direction
        while 0 <= at < len(self._flags):
            if self._flags[at] & flags:
                return at
            at += direction
        return None

    def start_of(self, index: int) -> int:
        return self._start[index]

    def step_of(self, index: int) -> int:
        return self._first[index]

    def _fold(self) -> None:
        """Merge every two neighbouring points into one, to halve their number."""
        self.steps_per_point *= 2
        num = len(self._first) // 2 * 2
        first, last = self._first[0:num:2], self._last[1:num:2]
        start, end = self._start[0:num:2], self._end[1:num:2]
        numbers = []
        for place, column in enumerate(self._numbers):
            left, right = column[0:num:2], column[1:num:2]
            merged = right if place == 2 else array("i", map(max, left, right))
            numbers.append(merged)
        pairs = zip(self._flags[0:num:2], self._flags[1:num:2], strict=True)
        self._flags = array("B", (left | right for left, right in pairs))
        self._first, self._last, self._start, self._end = first, last, start, end
        self._numbers = tuple(numbers)
