"""`PackedColumn`: a column of whole numbers in few bytes, for the index of a recording.

Numbers are stored as differences: to the number before, to the number of another column in the same
row, or to the least number. Of these, the one is taken that compresses best. The bytes are stored
by place: first the lowest byte of every number, then the next one, so that alike bytes are
neighbours.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import zstandard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MASK = (1 << 64) - 1


class PackedColumn(msgspec.Struct, array_like=True, frozen=True):
    """A column: number i is `base` plus unsigned number i of `planes`, plus what it differs from.

    All sums are modulo 2^64, and the result is a signed number.

    Attributes:
        width: bytes of each number in `planes`, 0 to 8, lowest byte first.
        start: if given, each number is a difference to the number before it, and this is the one
            before the first.
        beside: the column that each number is a difference to; "" for none.
    """

    base: int
    width: int
    planes: bytes
    start: int | None = None
    beside: str = ""


def pack(values: "NDArray[np.int64]", near: "Mapping[str, NDArray[np.int64]]") -> PackedColumn:
    """Pack a column.

    Args:
        near: columns that its numbers may be close to, by name.
    """
    import numpy as np

    packed = [_packed(values), *(_packed(values - near[name], beside=name) for name in near)]
    if len(values) > 1:
        steps = np.diff(values)
        least = int(steps.min())
        start = (int(values[0]) - least) & _MASK
        packed.append(_packed(np.concatenate(([least], steps)), start=start))
    return min(packed, key=lambda each: len(zstandard.compress(each.planes, 1)))


def unpack(
    column: PackedColumn, number: int, near: "Mapping[str, NDArray[np.int64]]"
) -> "NDArray[np.int64]":
    """The numbers of a column.

    Args:
        number: how many they are.
        near: the columns that it may refer to, by name.

    Raises:
        ValueError, LookupError: it was not packed from so many numbers, or from such columns.
    """
    import numpy as np

    planes = np.frombuffer(column.planes, dtype=np.uint8).reshape(column.width, number)
    wide = np.zeros((number, 8), dtype=np.uint8)
    wide[:, : column.width] = planes.T
    values = wide.view("<u8").reshape(number) + np.uint64(column.base & _MASK)
    if column.start is not None:
        values = np.cumsum(values, dtype=np.uint64) + np.uint64(column.start)
    found = values.view(np.int64)
    return found + near[column.beside] if column.beside else found


def _packed(
    values: "NDArray[np.int64]", start: int | None = None, beside: str = ""
) -> PackedColumn:
    import numpy as np

    base = int(values.min()) if len(values) else 0
    above = values.view(np.uint64) - np.uint64(base & _MASK)
    width = (int(above.max()).bit_length() + 7) // 8 if len(values) else 0
    planes = above.astype("<u8").view(np.uint8).reshape(len(values), 8)[:, :width].T.tobytes()
    return PackedColumn(base, width, planes, start, beside)
