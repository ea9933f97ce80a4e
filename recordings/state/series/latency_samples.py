"""`Samples`: weighted samples in order of time, with fast exact percentiles of any window.

Each full block of samples is sorted by value once. A percentile of a window is found by binary
search over values: in logarithmic time, each block counts its samples up to a value. So the window
is never sorted as a whole, and the result is still exact.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

BLOCK_SAMPLES = 1024


def bounded(value: int) -> int:
    """Clamp to the range of a 64-bit array entry."""
    return min(max(value, -(2**63)), 2**63 - 1)


class Block:
    """At least one sample, sorted by value. `ranks` are cumulative weights."""

    __slots__ = ("ranks", "values")

    def __init__(self, values: "array[int]", weights: "array[int]") -> None:
        # Sorting value and weight packed into one number takes a quarter of the time of sorting
        # pairs.
        base = max(weights) + 1
        ordered = sorted(
            [value * base + weight for value, weight in zip(values, weights, strict=True)]
        )
        self.values = array("q", [number // base for number in ordered])
        self.ranks = array("q", accumulate([number % base for number in ordered]))

    def num_up_to(self, value: float) -> int:
        """Weight of the samples that do not exceed a value."""
        place = bisect_right(self.values, value)
        return self.ranks[place - 1] if place else 0


class Ranked:
    """The samples of several blocks together."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self.count = sum([block.ranks[-1] for block in blocks])

    @property
    def smallest(self) -> int:
        return min([block.values[0] for block in self._blocks])

    @property
    def largest(self) -> int:
        return max([block.values[-1] for block in self._blocks])

    def num_up_to(self, value: float) -> int:
        """Weight of the samples that do not exceed a value."""
        return sum([block.num_up_to(value) for block in self._blocks])

    def percentiles(self, ranks: tuple[int, ...]) -> list[int]:
        """Nearest-rank percentiles, in the order of `ranks`.

        A percentile is the smallest sample whose cumulative weight reaches that share of all
        samples.

        Args:
            ranks: percentages, ascending, each in (0, 100].
        """
        found: list[int] = []
        low, most = self.smallest, self.largest
        for rank in ranks:
            wanted, high = -(-rank * self.count // 100), most
            while low < high:
                middle = (low + high) // 2
                if self.num_up_to(middle) < wanted:
                    low = middle + 1
                else:
                    high = middle
            found.append(low)
        return found


class Samples:
    """Weighted samples by time. One thread writes; readers hold its lock or use a `cut`."""

    def __init__(self) -> None:
        self._times = array("q")
        self._values = array("q")
        self._weights = array("q")
        self._num_forgotten = 0
        self._blocks: dict[int, Block] = {}  # whole blocks, by number

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
        end = self._num_forgotten + len(times)
        if end % BLOCK_SAMPLES == 0 and len(times) >= BLOCK_SAMPLES:
            self._blocks[end // BLOCK_SAMPLES - 1] = Block(
                self._values[-BLOCK_SAMPLES:], self._weights[-BLOCK_SAMPLES:]
            )

    def extend(
        self, times_ns: Sequence[int], values_ns: Sequence[int], weights: Sequence[int]
    ) -> None:
        """Append several samples, with the same result as `add` for each."""
        times = self._times
        begin = self._num_forgotten + len(times)
        since_ns = times[-1] if times else min(times_ns, default=0)
        times.extend(list(accumulate(times_ns, max, initial=since_ns))[1:])
        try:
            values = array("q", values_ns)
        except OverflowError:
            values = array("q", map(bounded, values_ns))
        self._values.extend(values)
        self._weights.extend(weights)
        end = self._num_forgotten + len(times)
        first = max(begin // BLOCK_SAMPLES, self._first_block)
        for number in range(first, end // BLOCK_SAMPLES):
            place = number * BLOCK_SAMPLES - self._num_forgotten
            self._blocks[number] = self._sorted(place, place + BLOCK_SAMPLES)

    def after(self, earlier: "Samples") -> "Samples":
        """A new object with the samples of `earlier`, then those of `self`. Neither is changed."""
        whole = Samples()
        for part in (earlier, self):
            whole.extend(part._times, part._values, part._weights)
        return whole

    def forget_before(self, time_ns: int) -> None:
        num_old = bisect_left(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[:num_old]
        self._num_forgotten += num_old
        for number in range((self._num_forgotten - num_old) // BLOCK_SAMPLES, self._first_block):
            self._blocks.pop(number, None)

    def forget_after(self, time_ns: int) -> None:
        num_kept = bisect_right(self._times, time_ns)
        for column in (self._times, self._values, self._weights):
            del column[num_kept:]
        end = (self._num_forgotten + num_kept) // BLOCK_SAMPLES
        for number in [each for each in self._blocks if each >= end]:
            del self._blocks[number]

    @property
    def _first_block(self) -> int:
        """Number of the first block of which no sample was forgotten."""
        return -(-self._num_forgotten // BLOCK_SAMPLES)

    def cut(self, start_ns: int, end_ns: int) -> "Samples":
        """A copy of the samples in (start_ns, end_ns]."""
        first = bisect_right(self._times, start_ns)
        last = bisect_right(self._times, end_ns)
        part = Samples()
        part._times = self._times[first:last]
        part._values = self._values[first:last]
        part._weights = self._weights[first:last]
        part._num_forgotten = self._num_forgotten + first
        end = (self._num_forgotten + last) // BLOCK_SAMPLES
        part._blocks = {number: self._blocks[number] for number in range(part._first_block, end)}
        return part

    def num_until(self, time_ns: int) -> int:
        """Number of entries up to and including a time."""
        return bisect_right(self._times, time_ns)

    def num_above(self, start_ns: int, end_ns: int, value: float) -> int:
        """Weight of the samples in (start_ns, end_ns] that exceed a value. Scans all of them."""
        first = bisect_right(self._times, start_ns)
        last = bisect_right(self._times, end_ns, first)
        pairs = zip(self._values[first:last], self._weights[first:last], strict=True)
        return sum([weight for each, weight in pairs if each > value])

    def ranked(self, first: int = 0, last: int | None = None) -> Ranked | None:
        """The samples in the places [first, last), ranked by value; None if there are none."""
        if last is None:
            last = len(self)
        if first >= last:
            return None
        begin, end = self._num_forgotten + first, self._num_forgotten + last
        numbers = range(-(-begin // BLOCK_SAMPLES), end // BLOCK_SAMPLES)
        if not numbers:
            return Ranked([self._sorted(first, last)])
        blocks = [self._blocks[number] for number in numbers]
        head = numbers[0] * BLOCK_SAMPLES - self._num_forgotten
        tail = (numbers[-1] + 1) * BLOCK_SAMPLES - self._num_forgotten
        if first < head:
            blocks.append(self._sorted(first, head))
        if tail < last:
            blocks.append(self._sorted(tail, last))
        return Ranked(blocks)

    def _sorted(self, first: int, last: int) -> Block:
        return Block(self._values[first:last], self._weights[first:last])

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
