"""`BlockSums`: sums over ranges of places in columns that only grow, each block summed once."""

from collections.abc import Callable

_BLOCK = 512  # places


class BlockSums:
    """Caches the sums of whole blocks. The owner of the columns calls it when places go."""

    def __init__(self) -> None:
        self._num_forgotten = 0
        self._known: dict[tuple[str, int], int | None] = {}  # by what is summed, and block

    def total(
        self, name: str, first: int, last: int, measure: Callable[[int, int], int | None]
    ) -> int | None:
        """The sum of `measure` over the places `first` to before `last`.

        Args:
            name: of what is measured.
            measure: gives it for a range of places; None is unknown, and then so is the sum.
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
        """The places before `place` are gone, which is now the first."""
        self._num_forgotten += place
        begin = -(-self._num_forgotten // _BLOCK)
        self._known = {key: total for key, total in self._known.items() if key[1] >= begin}

    def forget_after(self, num_places: int) -> None:
        """There are only so many places left."""
        end = (self._num_forgotten + num_places) // _BLOCK
        self._known = {key: total for key, total in self._known.items() if key[1] < end}
