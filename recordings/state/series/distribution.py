"""`Distribution`: many samples in little memory, exact while distinct values are few."""

from stepscope.recordings.state.series.latency import percentiles


class Distribution:
    """Counts of whole numbers. The largest sample is always exact.

    Up to `max_values` distinct values are counted exactly. With more, only the leading bits of each
    value are kept, as HdrHistogram does. A percentile is then too small by less than one part in
    `2 ** (num_bits - 1)`.

    Args:
        max_values: how many distinct values are counted exactly.
        num_bits: leading bits of each value that are kept when there are more distinct values.
    """

    __slots__ = ("_counts", "_is_exact", "_max_values", "_num_bits", "count", "largest")

    def __init__(self, max_values: int = 100_000, num_bits: int = 11) -> None:
        self.count = 0
        self.largest = 0
        self._counts: dict[int, int] = {}
        self._max_values = max_values
        self._num_bits = num_bits
        self._is_exact = True

    def add(self, value: int, weight: int = 1) -> None:
        """Add `weight` samples of a value. A negative value counts as 0."""
        # Simulations call it for every step, so it calls as few functions as it can.
        if value < 0:
            value = 0
        self.count += weight
        if value > self.largest:
            self.largest = value
        if not self._is_exact:
            value = self._rounded(value)
        counts = self._counts
        counts[value] = counts.get(value, 0) + weight
        if self._is_exact and len(counts) > self._max_values:
            self._round_all()

    def percentiles(self, *ranks: float) -> list[int]:
        """Nearest-rank percentiles; an empty list if there are no samples.

        Args:
            ranks: percentages, ascending, each in (0, 100].
        """
        if not self.count:
            return []
        return percentiles(sorted(self._counts.items()), self.count, ranks)

    def _rounded(self, value: int) -> int:
        shift = max(0, value.bit_length() - self._num_bits)
        return value >> shift << shift

    def _round_all(self) -> None:
        self._is_exact = False
        counts, self._counts = self._counts, {}
        for value, weight in counts.items():
            value = self._rounded(value)
            self._counts[value] = self._counts.get(value, 0) + weight
