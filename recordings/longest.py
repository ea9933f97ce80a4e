"""`Longest`: late tokens of one kind in order of time, of which the longest are found quickly.

They are put in order in blocks, once, so that asking again does not look at all of them.
"""

from bisect import bisect_left, bisect_right
from heapq import merge
from itertools import islice
from typing import NamedTuple

BLOCK = 1024  # breaches


class Breach(NamedTuple):
    """A step that brought tokens later than a bound, and the latest of them."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # without the operator's pauses
    request_id: int
    num_tokens: int = 1  # of the kind that were late in the step


class Longest:
    """The holder of the lock writes and reads."""

    def __init__(self) -> None:
        self._known: list[Breach] = []
        self._num_forgotten = 0
        self._blocks: dict[int, list[Breach]] = {}  # by number, longest first; those that are whole

    def add(self, breach: Breach) -> None:
        """One of a later step than the last."""
        known = self._known
        known.append(breach)
        end = self._num_forgotten + len(known)
        if end % BLOCK == 0 and len(known) >= BLOCK:
            self._blocks[end // BLOCK - 1] = sorted(known[-BLOCK:], key=_rank)

    def forget_before(self, step: int) -> None:
        num_old = bisect_left(self._known, step, key=_step)
        if not num_old:
            return
        del self._known[:num_old]
        before = self._num_forgotten // BLOCK
        self._num_forgotten += num_old
        for number in range(before, self._first_block):
            self._blocks.pop(number, None)

    def num_until(self, step: int | None) -> int:
        """How many there are up to a step (None: all)."""
        known = self._known
        return len(known) if step is None else bisect_right(known, step, key=_step)

    def until(self, step: int | None, limit: int) -> list[Breach]:
        """The longest up to a step (None: all), the longest first; of equal ones the earliest."""
        known, begin, end = self._known, self._num_forgotten, self.num_until(step)
        numbers = range(self._first_block, (begin + end) // BLOCK)
        if not numbers:
            return sorted(known[:end], key=_rank)[:limit]
        head = known[: numbers[0] * BLOCK - begin]
        tail = known[(numbers[-1] + 1) * BLOCK - begin : end]
        parts = [self._blocks[number] for number in numbers]
        parts += [sorted(head, key=_rank), sorted(tail, key=_rank)]
        return list(islice(merge(*parts, key=_rank), limit))

    @property
    def _first_block(self) -> int:
        """The first one of which nothing is forgotten."""
        return -(-self._num_forgotten // BLOCK)


def _rank(breach: Breach) -> tuple[int, int]:
    return -breach.ns, breach.step


def _step(breach: Breach) -> int:
    return breach.step
