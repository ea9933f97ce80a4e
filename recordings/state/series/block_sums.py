"""`BlockSums`: sums over ranges of growing columns, where each block of places is summed once."""

from collections.abc import Callable

_BLOCK = 512  # places


class BlockSums:
    """Caches the sums of whole blocks. The owner of the columns reports removed places here."""

    def __init__(self) -> None:
        self._num_forgotten = 0
        self._known: dict[tuple[str, int], int | None] = {}  # by name of the sum and block number

    def total(
        self, name: str, first: int, last: int, measure: Callable[[int, int], int | None]
    ) -> int | None:
        """Sum of `measure` over the places [first, last); None if any part is unknown.

        Args:
            name: cache key of the measured figure.
            measure: returns the figure for a range [begin, end) of places; None if unknown.
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
        """Note that the places before `place` were removed, so that `place` is now place 0."""
        self._num_forgotten += place
        begin = -(-self._num_forgotten // _BLOCK)
        self._known = {key: total for key, total in self._known.items() if key[1] >= begin}

    def forget_after(self, num_places: int) -> None:
        """Note that only the first `num_places` places are left."""
        end = (self._num_forgotten + num_places) // _BLOCK
        self._known = {key: total for key, total in self._known.items() if key[1] < end}
