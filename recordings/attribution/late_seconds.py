"""`LateSeconds`: for each second of engine time, the step that ended the longest late wait.

Late tokens come in swarms, so one per second is enough for a list to jump from. `WorstWaitIndex`
follows the same rule for files. Here the service levels are known, so steps without late tokens are
not kept.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from stepscope.recordings.attribution.longest import Longest

SECOND_NS = 1_000_000_000


class LateSeconds:
    """Seconds with a late step of one kind, in order. The holder of the lock writes and reads.

    The first and the last second in memory may be incomplete, so their worst step is looked up on
    demand.

    Args:
        late: all late steps. A step is added there just before it is added here.
    """

    def __init__(self, late: Longest) -> None:
        self._late = late
        self._firsts = array("q")  # the first late step of each second
        self._second = -1  # the newest second
        self._ended = Longest()  # the worst of each second except the last; may lack the first

    def extend(self, steps: Sequence[int], times_ns: Sequence[int]) -> None:
        """Add late steps, in order, all newer than the last one."""
        ended: list[int] = []
        for step, time_ns in zip(steps, times_ns, strict=True):
            second = time_ns // SECOND_NS
            if second == self._second and self._firsts:
                continue
            if self._firsts:
                ended.append(self._late.worst(self._firsts[-1], step - 1))
            self._firsts.append(step)
            self._second = second
        self._ended.extend(ended, [self._late.wait_ns(each) for each in ended])

    def forget_before(self, step: int) -> None:
        """Drop seconds before a step. Call it before more are added here or to `late`."""
        self._ended.forget_before(step)
        if self._firsts and self._firsts[0] < step:
            following = self._late.first_from(step)
            if following is None:
                del self._firsts[:]
            else:
                del self._firsts[: bisect_right(self._firsts, following) - 1]
                self._firsts[0] = following

    def num_until(self, step: int | None) -> int:
        """How many seconds there are up to and including that of `step` (None: all)."""
        return len(self._firsts) if step is None else bisect_right(self._firsts, step)

    def last(self, step: int | None, limit: int) -> list[int]:
        """The worst steps of the last seconds up to a step (None: all), oldest first.

        For the second of `step` itself, the worst up to it.
        """
        end = self.num_until(step)
        return [self._worst(at, step) for at in range(max(0, end - limit), end)]

    def next(self, step: int, direction: int) -> int | None:
        """The nearest worst step of a second after (direction 1) or before (-1) `step`."""
        find = bisect_right if direction > 0 else bisect_left
        at = find(self._firsts, step) - 1  # this second may lie on both sides of the step
        for each in (at, at + direction):
            if 0 <= each < len(self._firsts):
                worst = self._worst(each, None)
                if (worst - step) * direction > 0:
                    return worst
        return None

    def until(self, step: int | None, limit: int) -> list[int]:
        """The worst steps of seconds up to a step (None: all), the longest wait first.

        Of equal ones the earliest comes first. Takes logarithmic time.
        """
        number = self.num_until(step)
        found = [self._worst(at, step) for at in {0, number - 1} if 0 <= at < number]
        if number > 2:
            inner = self._ended.until(self._firsts[number - 1] - 1, limit + 1)
            found += [each for each in inner if each >= self._firsts[1]]
        found.sort(key=lambda each: (-self._late.wait_ns(each), each))
        return found[:limit]

    def _worst(self, at: int, step: int | None) -> int:
        """The step of a second with the longest wait, up to `step`."""
        last = self._firsts[at + 1] - 1 if at + 1 < len(self._firsts) else None
        if last is None or (step is not None and step < last):
            last = step
        return self._late.worst(self._firsts[at], last)
