"""`Longest`: late steps in order of time, and the longest waits among them.

Late tokens come in swarms, so one per second is enough for a list from which people jump to steps:
`LateSeconds` finds the step that ended the longest wait of each second of engine time.
`WorstWaits` follows the same rule for files. Here the service levels are known, so steps
without late tokens are not stored.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

SECOND_NS = 1_000_000_000
_MANY = 1024  # values; fewer are sorted in no time


class Breach(NamedTuple):
    """A step with tokens later than a bound, and the longest wait for one of these tokens."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # length of the wait without the operator's pauses
    request_id: int
    num_tokens: int = 1  # late tokens of this kind in the step


class Longest:
    """Steps and their longest ITL (or TTFT). Read and write it only under its lock."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._waits_ns = array("q")

    def extend(self, steps: Sequence[int], waits_ns: Sequence[int]) -> None:
        """Add steps, in order, all newer than the last one."""
        self._steps.extend(steps)
        self._waits_ns.extend(waits_ns)

    def forget_before(self, step: int) -> None:
        num_old = bisect_left(self._steps, step)
        del self._steps[:num_old]
        del self._waits_ns[:num_old]

    def wait_ns(self, step: int) -> int:
        """The longest wait of a step, which must not have been forgotten."""
        return self._waits_ns[bisect_left(self._steps, step)]

    def newest(self, number: int) -> Sequence[int]:
        """The longest waits of the last `number` steps."""
        return self._waits_ns[len(self._waits_ns) - number :]

    def first_from(self, step: int) -> int | None:
        """The first stored step at or after `step`; None without one."""
        at = bisect_left(self._steps, step)
        return self._steps[at] if at < len(self._steps) else None

    def worst(self, first: int, last: int | None) -> int:
        """The step with the longest wait in the steps [first, last]; of equal waits, the first.

        A `last` of None means the last stored step. There must be at least one.
        """
        begin = bisect_left(self._steps, first)
        waits_ns = self._waits_ns[begin : self.num_until(last)]
        return self._steps[begin + waits_ns.index(max(waits_ns))]

    def num_until(self, step: int | None) -> int:
        """Number of stored steps up to and including `step` (None: all)."""
        return len(self._steps) if step is None else bisect_right(self._steps, step)

    def last(self, step: int | None, limit: int) -> Sequence[int]:
        """The last `limit` stored steps up to a step (None: all), oldest first."""
        end = self.num_until(step)
        return self._steps[max(0, end - limit) : end]

    def until(self, step: int | None, limit: int) -> list[int]:
        """The steps with the longest waits up to a step (None: all), the longest first.

        Of equal ones the earliest comes first.
        """
        return [self._steps[at] for at in _largest(self._waits_ns[: self.num_until(step)], limit)]


class LateSeconds:
    """The seconds with a late ITL (or TTFT), in order. Read and write it only under its lock.

    The first and the last second in memory may be incomplete.

    Args:
        late: all late steps. A step is added there just before it is added here, and dropped there
            just before it is dropped here.
    """

    def __init__(self, late: Longest) -> None:
        self._late = late
        self._firsts = array("q")  # the first late step of each second
        self._waits_ns = array("q")  # the longest wait of each second, as of its last late step
        self._second = -1  # the newest second

    def extend(self, steps: Sequence[int], times_ns: Sequence[int]) -> None:
        """Add steps with late tokens, in order. All must be newer than the last one added."""
        waits_ns = self._late.newest(len(steps))
        for step, time_ns, wait_ns in zip(steps, times_ns, waits_ns, strict=True):
            second = time_ns // SECOND_NS
            if second == self._second and self._firsts:
                self._waits_ns[-1] = max(self._waits_ns[-1], wait_ns)
            else:
                self._firsts.append(step)
                self._waits_ns.append(wait_ns)
                self._second = second

    def forget_before(self, step: int) -> None:
        """Drop the seconds before a step. Call it before adding later steps here or to `late`."""
        if self._firsts and self._firsts[0] < step:
            following = self._late.first_from(step)
            num_old = len(self._firsts)
            if following is not None:
                num_old = bisect_right(self._firsts, following) - 1
            del self._firsts[:num_old], self._waits_ns[:num_old]
            if following is not None:
                self._firsts[0] = following
                self._waits_ns[0] = self._late.wait_ns(self._worst(0, None))

    def num_until(self, step: int | None) -> int:
        """Number of seconds with late tokens, including the second of `step` (None: all)."""
        return len(self._firsts) if step is None else bisect_right(self._firsts, step)

    def last(self, step: int | None, limit: int) -> list[int]:
        """The step with the longest wait of each of the last seconds up to a step, oldest first.

        `step` is None for all seconds. In the second of `step` itself, only steps up to `step`
        count.
        """
        end = self.num_until(step)
        return [self._worst(at, step) for at in range(max(0, end - limit), end)]

    def next(self, step: int, direction: int) -> int | None:
        """The nearest step before (direction -1) or after (1) `step` that is the worst of a second.

        The worst step of a second is the step with the longest wait.
        """
        find = bisect_right if direction > 0 else bisect_left
        at = find(self._firsts, step) - 1  # this second may lie on both sides of the step
        for each in (at, at + direction):
            if 0 <= each < len(self._firsts):
                worst = self._worst(each, None)
                if (worst - step) * direction > 0:
                    return worst
        return None

    def until(self, step: int | None, limit: int) -> list[int]:
        """The step with the longest wait of each second up to a step, longest wait first.

        `step` is None for all seconds. Of equal waits the earliest comes first.
        """
        number = self.num_until(step)
        waits_ns = self._waits_ns[:number]
        if number:  # the second of `step` may have longer waits after it
            waits_ns[-1] = self._late.wait_ns(self._worst(number - 1, step))
        return [self._worst(at, step) for at in _largest(waits_ns, limit)]

    def _worst(self, at: int, step: int | None) -> int:
        """The step of a second with the longest wait, up to `step`."""
        last = self._firsts[at + 1] - 1 if at + 1 < len(self._firsts) else None
        if last is None or (step is not None and step < last):
            last = step
        return self._late.worst(self._firsts[at], last)


def _largest(values: "array[int]", limit: int) -> list[int]:
    """The places of the largest values, the largest first; of equal ones the first."""
    places: Sequence[int] = range(len(values))
    if 0 < limit < len(values) and len(values) > _MANY:
        import numpy as np  # not at the start of the program: the import takes 80 ms

        numbers = np.frombuffer(values, dtype=np.int64)
        least = np.partition(numbers, len(values) - limit)[len(values) - limit]
        places = np.flatnonzero(numbers >= least).tolist()
    return nlargest(limit, places, key=values.__getitem__)
