"""`LateSeconds`: for each second of engine time, the step that ended the longest late wait.

Late tokens come in swarms, so one per second is enough for a list from which people jump to steps.
`WorstWaitIndex` follows the same rule for files. Here the service levels are known, so steps
without late tokens are not stored.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from stepscope.recordings.attribution.longest import Longest

SECOND_NS = 1_000_000_000


class LateSeconds:
    """The seconds with a late ITL (or TTFT), in order. Read and write it only under its lock.

    The first and the last second in memory may be incomplete. So their longest wait is looked up on
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
        """Add steps with late tokens, in order. All must be newer than the last one added."""
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
        """Drop the seconds before a step. Call it before adding later steps here or to `late`."""
        self._ended.forget_before(step)
        if self._firsts and self._firsts[0] < step:
            following = self._late.first_from(step)
            if following is None:
                del self._firsts[:]
            else:
                del self._firsts[: bisect_right(self._firsts, following) - 1]
                self._firsts[0] = following

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

        `step` is None for all seconds. Of equal waits the earliest comes first. Takes logarithmic
        time.
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
