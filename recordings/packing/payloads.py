"""The messages of a segment, stored in as few bytes as possible.

A segment is a group of consecutive messages in memory. A hundred records of one engine are mostly
the same: field names, and batch rows that continue. So a finished segment is compressed to a fifth
or less, and decompressed in half a millisecond.
"""

from array import array
from itertools import pairwise

import zstandard

_LEVEL = 1  # 3 takes twice the time for a twentieth less


class CompressedPayloads:
    """The messages of a finished segment. Immutable."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, payloads: list[bytes]) -> None:
        self._blob = compressed(b"".join(payloads))
        self._ends = array("I", [0])
        end = 0
        for payload in payloads:
            end += len(payload)
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def num_bytes(self) -> int:
        return len(self._blob) + 4 * len(self._ends)

    def all(self) -> list[bytes]:
        whole = zstandard.decompress(self._blob)
        return [whole[begin:end] for begin, end in pairwise(self._ends)]


def compressed(whole: bytes) -> bytes:
    """Compress bytes. `zstandard.decompress` restores them."""
    blob = zstandard.ZstdCompressor(level=_LEVEL).compress(whole)
    return bytes(memoryview(blob))  # copy it, as the original keeps its whole buffer
