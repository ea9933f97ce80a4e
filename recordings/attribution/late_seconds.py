"""`LateSeconds`: of each second of the engine's time the late step that waited the longest.

Late tokens come in swarms: of a second one is enough to go to. It is the rule that `WorstWaits` has
for files; here the service levels are known, so nothing is kept of other steps.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from stepscope.recordings.attribution.longest import Longest

SECOND_NS = 1_000_000_000


class LateSeconds:
    """Seconds with a late step of one kind, in order. The holder of the lock writes and reads.

    Of the first second in memory and of the last one there may be, or come, only a part: which step
    of these two waited the longest is looked up when it is asked for.

    Args:
        late: all late steps; they are added there just before they are here.
    """

    def __init__(self, late: Longest) -> None:
        self._late = late
        self._firsts = array("q")  # of each second the first late step
        self._second = -1  # the last of them
        self._ended = Longest()  # the longest of each but the last; of the first it may be missing

    def extend(self, steps: Sequence[int], times_ns: Sequence[int]) -> None:
        """Late steps that came after the last one, in order."""
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
        """Before any more are added to either."""
        self._ended.forget_before(step)
        if self._firsts and self._firsts[0] < step:
            following = self._late.first_from(step)
            if following is None:
                del self._firsts[:]
            else:
                del self._firsts[: bisect_right(self._firsts, following) - 1]
                self._firsts[0] = following

    def num_until(self, step: int | None) -> int:
        """How many seconds there are up to a step (None: all), the one it is in included."""
        return len(self._firsts) if step is None else bisect_right(self._firsts, step)

    def last(self, step: int | None, limit: int) -> list[int]:
        """The worst steps of the last seconds up to a step (None: all), oldest first.

        Of the second that the step is in, the worst so far.
        """
        end = self.num_until(step)
        return [self._worst(at, step) for at in range(max(0, end - limit), end)]

    def next(self, step: int, direction: int) -> int | None:
        """The nearest worst step of a second after (direction 1) or before (-1) `step`."""
        find = bisect_right if direction > 0 else bisect_left
        at = find(self._firsts, step) - 1  # a second that may be on both sides of it
        for each in (at, at + direction):
            if 0 <= each < len(self._firsts):
                worst = self._worst(each, None)
                if (worst - step) * direction > 0:
                    return worst
        return None

    def until(self, step: int | None, limit: int) -> list[int]:
        """The worst steps of seconds up to a step (None: all), the longest wait first.

        Of equal ones the earliest is the first. Costs the logarithm of how many there are.
        """
        number = self.num_until(step)
        found = [self._worst(at, step) for at in {0, number - 1} if 0 <= at < number]
        if number > 2:
            inner = self._ended.until(self._firsts[number - 1] - 1, limit + 1)
            found += [each for each in inner if each >= self._firsts[1]]
        found.sort(key=lambda each: (-self._late.wait_ns(each), each))
        return found[:limit]

    def _worst(self, at: int, step: int | None) -> int:
        """Of a second the step that waited the longest, of those up to `step`."""
        last = self._firsts[at + 1] - 1 if at + 1 < len(self._firsts) else None
        if last is None or (step is not None and step < last):
            last = step
        return self._late.worst(self._firsts[at], last)
