"""`WorstWaitIndex`: the longest ITL (or TTFT) of each second of a file, in a few bytes each."""

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import nlargest

from stepscope.recordings.attribution.longest import SECOND_NS
from stepscope.recordings.replay.chunk_latency import StepWait
from stepscope.recordings.state.series.latency_samples import bounded

_LOOKED_AT = 1024  # waits that `next` skips at once if none is above the bound


class WorstWaitIndex:
    """The longest ITL (or TTFT) of each second. One thread writes, any number read.

    Late tokens come in swarms, so one per second is enough for a list from which people jump to
    steps. The longest wait of a second serves for all service levels.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In order of steps; one column for each field of a `StepWait`.
        self._columns = [array("q") for _ in StepWait._fields]
        self._steps, self._times_ns, self._waits_ns, _, _ = self._columns

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, waits: Iterable[StepWait]) -> None:
        """Add the waits of consecutive steps, in order. Steps already there are skipped."""
        worst = list(_of_seconds(waits))
        if not worst:
            return
        with self._lock:
            at = bisect_left(self._steps, worst[0].step)
            if at < len(self._steps):  # of repeated steps, keep the first
                worst = [each for each in worst if each.step < self._steps[at]]
            if worst:
                for column, values in zip(self._columns, zip(*worst, strict=True), strict=True):
                    column[at:at] = array("q", map(bounded, values))
                self._join(at + len(worst))
                self._join(at)

    def next(self, step: int, direction: int, bound_ns: float) -> StepWait | None:
        """The nearest wait above a bound in a later step (direction 1) or an earlier one (-1)."""
        with self._lock:
            waits_ns, number = self._waits_ns, len(self._steps)
            if direction > 0:
                at = bisect_right(self._steps, step)
                while at < number and max(waits_ns[at : at + _LOOKED_AT]) <= bound_ns:
                    at += _LOOKED_AT
                places = range(at, number)
            else:
                at = bisect_left(self._steps, step)
                while at > 0 and max(waits_ns[max(0, at - _LOOKED_AT) : at]) <= bound_ns:
                    at -= _LOOKED_AT
                places = range(at - 1, -1, -1)
            return next((self._wait(each) for each in places if waits_ns[each] > bound_ns), None)

    def longest(self, limit: int, bound_ns: float) -> list[StepWait]:
        """The longest waits above a bound, longest first, then earliest."""
        with self._lock:
            waits_ns = self._waits_ns
            places = [at for at in range(len(waits_ns)) if waits_ns[at] > bound_ns]
            return [self._wait(at) for at in nlargest(limit, places, key=waits_ns.__getitem__)]

    def num_above(self, bound_ns: float) -> int:
        """How many seconds have a wait above a bound."""
        with self._lock:
            return sum([ns > bound_ns for ns in self._waits_ns])

    def _join(self, at: int) -> None:
        """If the entry at `at` and the one before share a second, keep the longer wait."""
        if not 0 < at < len(self._steps):
            return
        if self._times_ns[at - 1] // SECOND_NS != self._times_ns[at] // SECOND_NS:
            return
        shorter = at if self._waits_ns[at] <= self._waits_ns[at - 1] else at - 1
        for column in self._columns:
            del column[shorter]

    def _wait(self, at: int) -> StepWait:
        return StepWait(*[column[at] for column in self._columns])


def _of_seconds(waits: Iterable[StepWait]) -> Iterator[StepWait]:
    """The longest wait of each second of engine time; of equal ones the first."""
    worst: StepWait | None = None
    for each in waits:
        if worst is None:
            worst = each
        elif each.time_ns // SECOND_NS != worst.time_ns // SECOND_NS:
            yield worst
            worst = each
        elif each.ns > worst.ns:
            worst = each
    if worst is not None:
        yield worst
