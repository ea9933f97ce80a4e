"""`Longest`: late steps in order of time, with a quick look-up of the longest waits.

Each full block of steps is sorted once, so repeated look-ups do not scan all steps.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import merge
from itertools import islice
from typing import NamedTuple

BLOCK = 1024  # steps


class Breach(NamedTuple):
    """A step with tokens later than a bound, and the longest wait for one of these tokens."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # length of the wait without the operator's pauses
    request_id: int
    num_tokens: int = 1  # late tokens of this kind in the step


class Longest:
    """Steps and their longest ITL (or TTFT), 16 bytes each. Read and write it only under its lock.

    Each step has a fixed number: how many steps were added before it.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._waits_ns = array("q")
        self._num_forgotten = 0
        self._blocks: dict[int, list[int]] = {}  # numbers of full blocks, longest wait first

    def extend(self, steps: Sequence[int], waits_ns: Sequence[int]) -> None:
        """Add steps, in order, all newer than the last one."""
        before = self._end
        self._steps.extend(steps)
        self._waits_ns.extend(waits_ns)
        for block in range(max(before // BLOCK, self._first_block), self._end // BLOCK):
            self._blocks[block] = self._ranked(block * BLOCK, (block + 1) * BLOCK)

    def forget_before(self, step: int) -> None:
        num_old = bisect_left(self._steps, step)
        if not num_old:
            return
        del self._steps[:num_old]
        del self._waits_ns[:num_old]
        before = self._num_forgotten // BLOCK
        self._num_forgotten += num_old
        for block in range(before, self._first_block):
            self._blocks.pop(block, None)

    def wait_ns(self, step: int) -> int:
        """The longest wait of a step, which must not have been forgotten."""
        return self._waits_ns[bisect_left(self._steps, step)]

    def first_from(self, step: int) -> int | None:
        """The first stored step at or after `step`; None without one."""
        at = bisect_left(self._steps, step)
        return self._steps[at] if at < len(self._steps) else None

    def worst(self, first: int, last: int | None) -> int:
        """The step with the longest wait in the steps [first, last]; of equal waits, the first.

        A `last` of None means the last stored step. Scans all of these steps; there must be at
        least one.
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
        begin = self._num_forgotten
        end = begin + self.num_until(step)
        blocks = range(self._first_block, end // BLOCK)
        if blocks:
            parts = [self._blocks[block] for block in blocks]
            parts.append(self._ranked(begin, blocks[0] * BLOCK))
            parts.append(self._ranked(blocks[-1] * BLOCK + BLOCK, end))
        else:
            parts = [self._ranked(begin, end)]
        steps = self._steps
        return [steps[each - begin] for each in islice(merge(*parts, key=self._rank), limit)]

    @property
    def _end(self) -> int:
        return self._num_forgotten + len(self._steps)

    @property
    def _first_block(self) -> int:
        """Number of the first block of which no step was forgotten."""
        return -(-self._num_forgotten // BLOCK)

    def _ranked(self, first: int, end: int) -> list[int]:
        """The numbers in [first, end), longest wait first."""
        waits_ns = self._waits_ns[first - self._num_forgotten : end - self._num_forgotten]
        places = sorted(range(len(waits_ns)), key=waits_ns.__getitem__, reverse=True)
        return [first + place for place in places]

    def _rank(self, number: int) -> tuple[int, int]:
        return -self._waits_ns[number - self._num_forgotten], number
