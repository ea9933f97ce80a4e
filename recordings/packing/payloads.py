"""The messages of a segment, stored in as few bytes as possible.

A segment is a group of consecutive messages in memory. A hundred records of one engine are mostly
the same: field names, and batch rows that continue. So a finished segment is compressed to a fifth
or less, and decompressed in half a millisecond. Steps from a file stay packed until they are read.
"""

from array import array
from collections.abc import Collection
from itertools import pairwise

import msgspec
import zstandard

from stepscope.engine.protocol.wire import BatchRow
from stepscope.recordings.packing.steps import StepUnpacker

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


class OpenPayloads:
    __slots__ = ("_before", "_packed", "_payloads")

    def __init__(self, payloads: list[bytes]) -> None:
        self._payloads = payloads
        self._packed: set[int] = set()
        self._before: list[BatchRow] = []  # the batch of the step before the first one

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    def append(self, payload: bytes) -> None:
        self._payloads.append(payload)

    def extend_packed(self, payloads: list[bytes], before: list[BatchRow] | None) -> None:
        """Add packed steps.

        `before` is the batch of the step before the first, if that is not among the messages.
        """
        if before is not None:
            self._before = before
        begin = len(self._payloads)
        self._packed.update(range(begin, begin + len(payloads)))
        self._payloads += payloads

    def all(self, step_places: Collection[int]) -> list[bytes]:
        """All messages, unpacked, as received from the engine.

        `step_places`: indices of the steps.
        """
        if self._packed:
            unpacker = StepUnpacker([list(msgspec.structs.astuple(row)) for row in self._before])
            for place in step_places:
                payload = self._payloads[place]
                if place in self._packed:
                    self._payloads[place] = unpacker.unpack(payload)
                else:
                    unpacker.take(payload)
            self._packed.clear()
        return self._payloads
