"""`Samples`: weighted samples in order of time, with exact percentiles of any window."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate


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


class Samples:
    """Weighted samples by time. One thread writes; readers hold its lock or use a `cut`."""

    def __init__(self) -> None:
        self._times = array("q")
        self._values = array("q")
        self._weights = array("q")

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Time, value and weight of each sample."""
        return zip(self._times, self._values, self._weights, strict=True)

    def add(self, time_ns: int, value_ns: int, weight: int = 1) -> None:
        """Append a sample.

        If its time is earlier than the time of the last entry, the latter is used, to keep the
        order.
        """
        times = self._times
        times.append(max(time_ns, times[-1]) if times else time_ns)
        self._values.append(bounded(value_ns))
        self._weights.append(weight)

    def after(self, earlier: "Samples") -> "Samples":
        """A new object with the samples of `earlier`, then those of `self`. Neither is changed."""
        whole = Samples()
        whole._times = array("q", accumulate(earlier._times + self._times, max))
        whole._values = earlier._values + self._values
        whole._weights = earlier._weights + self._weights
        return whole

    def forget_before(self, time_ns: int) -> None:
        num_old = bisect_left(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[:num_old]

    def forget_after(self, time_ns: int) -> None:
        num_kept = bisect_right(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[num_kept:]

    def cut(self, start_ns: int, end_ns: int) -> "Samples":
        """A copy of the samples in (start_ns, end_ns]."""
        first = bisect_right(self._times, start_ns)
        last = bisect_right(self._times, end_ns)
        part = Samples()
        part._times = self._times[first:last]
        part._values = self._values[first:last]
        part._weights = self._weights[first:last]
        return part

    def num_above(self, start_ns: int, end_ns: int, value: float) -> int:
        """Weight of the samples in (start_ns, end_ns] that exceed a value."""
        part = self.cut(start_ns, end_ns).ranked()
        return 0 if part is None else part.count - part.num_up_to(value)

    def num_until(self, time_ns: int) -> int:
        """Number of entries up to and including a time."""
        return bisect_right(self._times, time_ns)

    def ranked(self, first: int = 0, last: int | None = None) -> Ranked | None:
        """The samples in the places [first, last), ranked by value; None if there are none."""
        values, weights = self._values[first:last], self._weights[first:last]
        return Ranked(values, weights) if values else None

    def worst(self, start_ns: int, end_ns: int, slices: int) -> list[int | None]:
        """The largest sample of each slice of (start_ns, end_ns], oldest first.

        Slices end at multiples of their width, so that they do not shift as time goes on.
        """
        worst: list[int | None] = []
        width_ns = max(1, (end_ns - start_ns) // slices)
        newest_ns = -(-end_ns // width_ns) * width_ns
        first = bisect_right(self._times, newest_ns - width_ns * slices)
        for number in range(slices - 1, -1, -1):
            last = bisect_right(self._times, min(newest_ns - width_ns * number, end_ns), first)
            worst.append(max(self._values[first:last], default=None))
            first = last
        return worst
