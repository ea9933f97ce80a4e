"""`BlockSums`: sums over index ranges of growing columns. Each block of entries is summed once."""

from collections.abc import Callable

_BLOCK = 512  # places


class BlockSums:
    """Caches sums over full blocks of entries.

    The owner of the columns must report entries that it removes.
    """

    def __init__(self) -> None:
        self._num_forgotten = 0
        self._known: dict[tuple[str, int], int | None] = {}  # by name of the sum and block number

    def total(
        self, name: str, first: int, last: int, measure: Callable[[int, int], int | None]
    ) -> int | None:
        """Sum of `measure` over the entries [first, last); None if any part is unknown.

        Args:
            name: cache key of the measured quantity.
            measure: returns the sum over the entries [begin, end); None if unknown.
        """
        forgotten, known = self._num_forgotten, self._known
        begin = -(-(first + forgotten) // _BLOCK)
        end = (last + forgotten) // _BLOCK
        if begin >= end:
            return measure(first, last)
        parts: list[int | None] = []
        if first < (head := begin * _BLOCK - forgotten):
            parts.append(measure(first, head))
        for block in range(begin, end):
            key = name, block
            if key not in known:
                place = block * _BLOCK - forgotten
                known[key] = measure(place, place + _BLOCK)
            parts.append(known[key])
        if (tail := end * _BLOCK - forgotten) < last:
            parts.append(measure(tail, last))
        total = 0
        for part in parts:
            if part is None:
                return None
            total += part
        return total

    def forget_before(self, place: int) -> None:
        """Report that the entries before index `place` were removed: `place` is now index 0."""
        self._num_forgotten += place
        begin = -(-self._num_forgotten // _BLOCK)
        self._known = {key: total for key, total in self._known.items() if key[1] >= begin}

    def forget_after(self, num_places: int) -> None:
        """Report that only the first `num_places` entries are left."""
        end = (self._num_forgotten + num_places) // _BLOCK
        self._known = {key: total for key, total in self._known.items() if key[1] < end}
