"""`StepPoints`: numbers of the steps of a run for charts, in bounded memory.

A point is one step. Beyond `MAX_POINTS` steps, a point is the maximum over two steps, then over
four, and so on. A point takes 96 bytes, so a run of any length takes at most 25 MB.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.recordings.session.steps import UNKNOWN
from stepscope.recordings.state.lazy_numpy import Ints, np

MAX_POINTS = 1 << 18
PREEMPTED, KNOB, MARKED, LATE, LOST = 1, 2, 4, 8, 16  # flags


class StepPoint(NamedTuple):
    """Maxima over the steps `first` to `last` of a run. Times count from the start of the run."""

    first: int
    last: int
    start_ns: int
    end_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    token_budget: int | None
    num_waiting: int | None
    longest_us: int | None  # longest ITL wait that ended here
    duration_us: int
    flags: int


_FIRST, _LAST, _START, _END, _FLAGS = 0, 1, 2, 3, -1  # fields of `StepPoint`


class StepPoints:
    """The points of a run in columns. One thread writes; readers must hold its lock."""

    def __init__(self) -> None:
        self._per_point = 1  # steps
        self._in_last = 0  # steps in the last point
        self._points = np.zeros((len(StepPoint._fields), 0), dtype=np.int64)

    def __len__(self) -> int:
        return self._points.shape[1]

    @property
    def first_step(self) -> int | None:
        return int(self._points[_FIRST, 0]) if len(self) else None

    @property
    def last_step(self) -> int | None:
        return int(self._points[_LAST, -1]) if len(self) else None

    @property
    def end_ns(self) -> int:
        """When the last step ended, in nanoseconds since the start of the run."""
        return int(self._points[_END, -1]) if len(self) else 0

    def extend(self, steps: Ints) -> None:
        """Add steps, which must be later than the last one.

        `steps`: a row for each field of `StepPoint`; `UNKNOWN` where a value is unknown.
        """
        num_held, points = 0, self._points
        if 0 < self._in_last < self._per_point:  # the last point is made anew with them
            num_held = self._in_last - 1  # in its column are more steps than one
            steps = np.concatenate((points[:, -1:], steps), axis=1)
            points = points[:, :-1]
        number = num_held + steps.shape[1]
        begins = [max(0, begin - num_held) for begin in range(0, number, self._per_point)]
        self._in_last = number - (len(begins) - 1) * self._per_point
        self._points = np.concatenate((points, _merged(steps, begins)), axis=1)
        while len(self) > MAX_POINTS:
            if len(self) % 2 == 0:
                self._in_last += self._per_point
            self._per_point *= 2
            self._points = _merged(self._points, range(0, len(self), 2))

    def flag(self, step: int, flag: int) -> None:
        """Set a flag on the point that contains a step, or on the nearest point before it."""
        if (index := self.index_at(step, by_step=True)) >= 0:
            self._points[_FLAGS, index] |= flag

    # Finding

    def index_at(self, place: int, *, by_step: bool = False) -> int:
        """Index of the last point that begins at or before a time, or a step; -1 if none does."""
        return self._last_until(_FIRST if by_step else _START, place)

    def index_ended(self, place: int, *, by_step: bool = False) -> int:
        """Index of the last point that has ended by a time, or before a step; -1 if none has."""
        return self._last_until(_LAST, place - 1) if by_step else self._last_until(_END, place)

    def start_of(self, index: int, *, by_step: bool = False) -> int:
        return int(self._points[_FIRST if by_step else _START, index])

    def worst(self, first: int, last: int) -> StepPoint | None:
        """Maxima over the points with these indices; None if there are none."""
        first, last = max(0, first), min(last, len(self) - 1)
        if first > last:
            return None
        values = _merged(self._points[:, first : last + 1], [0])[:, 0].tolist()
        return StepPoint(*(None if value == UNKNOWN else value for value in values))  # type: ignore[arg-type]

    def next_flagged(self, index: int, direction: int, flags: int) -> int | None:
        """Index of the nearest point with any of these flags, after (1) or before (-1) `index`."""
        flagged = (self._points[_FLAGS] & flags).nonzero()[0]
        after = int(flagged.searchsorted(index, "right" if direction > 0 else "left"))
        at = after if direction > 0 else after - 1
        return int(flagged[at]) if 0 <= at < len(flagged) else None

    def _last_until(self, field: int, value: int) -> int:
        return int(self._points[field].searchsorted(value, "right")) - 1


def _merged(points: Ints, begins: Sequence[int]) -> Ints:
    merged: Ints = np.maximum.reduceat(points, begins, axis=1)
    for field in (_FIRST, _START):
        merged[field] = points[field, begins]
    merged[_FLAGS] = np.bitwise_or.reduceat(points[_FLAGS], begins)
    return merged
