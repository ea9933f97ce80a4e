"""`TimedRows`: numbers by time; `Samples`: latencies, with exact percentiles of any window."""

import copy
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Self


def bounded(value: int) -> int:
    """Clamp to the range of a 64-bit array entry."""
    return min(max(value, -(2**63)), 2**63 - 1)


class Ranked:
    """Some samples in order of their values. At least one."""

    def __init__(self, values: "array[int]", weights: "array[int]") -> None:
        import numpy as np  # not at the start of the program: the import takes 80 ms

        order = np.argsort(unsorted := np.frombuffer(values, dtype=np.int64), kind="stable")
        self._values = unsorted[order]
        self._upto = np.cumsum(np.frombuffer(weights, dtype=np.int64)[order])
        self.count = int(self._upto[-1])
        self.smallest, self.largest = int(self._values[0]), int(self._values[-1])

    def num_up_to(self, value: float) -> int:
        """Weight of the samples that do not exceed a value."""
        place = int(self._values.searchsorted(bounded(math.floor(value)), side="right"))
        return int(self._upto[place - 1]) if place else 0

    def percentiles(self, ranks: Sequence[int]) -> list[int]:
        """Nearest-rank percentiles; `ranks` are percentages, ascending, each in (0, 100].

        A percentile is the smallest sample whose cumulative weight reaches that share of all
        samples.
        """
        places = self._upto.searchsorted([-(-rank * self.count // 100) for rank in ranks])
        return [int(value) for value in self._values[places]]


class TimedRows:
    """Rows of whole numbers in order of time.

    One thread writes; readers hold its lock or use a `cut`.

    Args:
        num_columns: how many numbers a row has besides its time.
    """

    def __init__(self, num_columns: int) -> None:
        self._columns = [array("q") for _ in range(1 + num_columns)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*self._columns, strict=True)

    def append(self, time_ns: int, *values: int) -> None:
        """Add a row. To keep the order, its time is at least that of the last one."""
        times = self._columns[0]
        row = max(time_ns, times[-1]) if times else time_ns, *values
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def after(self, earlier: Self) -> Self:
        """A new object with the rows of `earlier`, then those of `self`. Neither is changed."""
        columns = [a + b for a, b in zip(earlier._columns, self._columns, strict=True)]
        return self._with([array("q", accumulate(columns[0], max)), *columns[1:]])

    def cut(self, start_ns: int, end_ns: int) -> Self:
        """A copy of the rows with times in (start_ns, end_ns]."""
        first, last = (bisect_right(self._columns[0], each) for each in (start_ns, end_ns))
        return self._with([column[first:last] for column in self._columns])

    def forget_before(self, time_ns: int) -> None:
        num_old = bisect_left(self._columns[0], time_ns)
        for column in self._columns:
            del column[:num_old]

    def forget_after(self, time_ns: int) -> None:
        num_kept = self.num_until(time_ns)
        for column in self._columns:
            del column[num_kept:]

    def num_until(self, time_ns: int) -> int:
        return bisect_right(self._columns[0], time_ns)

    def _with(self, columns: "list[array[int]]") -> Self:
        other = copy.copy(self)
        other._columns = columns
        return other


class Samples(TimedRows):
    def __init__(self) -> None:
        super().__init__(2)

    def add(self, time_ns: int, value_ns: int, weight: int = 1) -> None:
        """Append a sample, like `append` but in half the time: every step has several."""
        times, values, weights = self._columns
        times.append(max(time_ns, times[-1]) if times else time_ns)
        values.append(bounded(value_ns))
        weights.append(weight)

    def num_above(self, start_ns: int, end_ns: int, value: float) -> int:
        """Weight of the samples in (start_ns, end_ns] that exceed a value."""
        part = self.cut(start_ns, end_ns).ranked()
        return 0 if part is None else part.count - part.num_up_to(value)

    def ranked(self, first: int = 0, last: int | None = None) -> Ranked | None:
        """The samples in the places [first, last), ranked by value; None if there are none."""
        _, values, weights = (column[first:last] for column in self._columns)
        return Ranked(values, weights) if values else None

    def worst(self, start_ns: int, end_ns: int, slices: int) -> list[int | None]:
        """The largest sample of each slice of (start_ns, end_ns], oldest first.

        Slices end at multiples of their width, so that they do not shift as time goes on.
        """
        times, values, _ = self._columns
        worst: list[int | None] = []
        width_ns = max(1, (end_ns - start_ns) // slices)
        newest_ns = -(-end_ns // width_ns) * width_ns
        first = bisect_right(times, newest_ns - width_ns * slices)
        for number in range(slices - 1, -1, -1):
            last = bisect_right(times, min(newest_ns - width_ns * number, end_ns), first)
            worst.append(max(values[first:last], default=None))
            first = last
        return worst
