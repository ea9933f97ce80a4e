"""`ReplayRing`: the last messages as they were sent, for subscribers that missed some.

Message bytes are copied into large memory segments that are reused. As separate objects each
message would cost the engine a page fault until the ring is full, and the garbage collector would
walk over all of them.
"""

import contextlib
import mmap
from typing import NamedTuple

SEGMENT_BYTES = 4 * 1024 * 1024
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages


class Kept(NamedTuple):
    """A message in the ring."""

    sequence: int
    topic: bytes
    payload: bytes


class ReplayRing:
    """The last messages. One thread adds them; any thread may `get`.

    Attributes:
        next_sequence: number of the next message that is added.
        oldest_sequence: number of the oldest message that is kept.
        num_bytes: bytes of the kept payloads.

    Args:
        size: messages to keep, at most.
        max_bytes: bytes to keep, at most; the newest message is kept whatever its size.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self.next_sequence = 0
        self.oldest_sequence = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._size = size
        # For each message, at its number modulo the size:
        self._topics = [b""] * size
        self._segments: list[mmap.mmap | None] = [None] * size
        self._starts = [0] * size
        self._lengths = [0] * size
        self._segment: mmap.mmap | None = None  # the segment that is being filled
        self._end = 0  # where its free part begins
        self._spare: list[mmap.mmap] = []

    def add(self, topic: bytes, payload: bytes | bytearray) -> None:
        """Keep the next message, and drop the oldest ones to make room for it."""
        length = len(payload)
        sequence = self.next_sequence
        self.num_bytes += length
        # Drop messages before overwriting their memory, so that a reader never gets a wrong one.
        while self.oldest_sequence < sequence and (
            sequence - self.oldest_sequence >= self._size or self.num_bytes > self._max_bytes
        ):
            self._give_up_oldest()
        segment = self._segment
        start = self._end
        if segment is None or start + length > len(segment):
            segment = self._next_segment(length)
            start = 0
        end = start + length
        segment[start:end] = payload
        place = sequence % self._size
        self._topics[place] = topic
        self._segments[place] = segment
        self._starts[place] = start
        self._lengths[place] = length
        self._end = end
        self.next_sequence = sequence + 1

    def get(self, sequence: int) -> Kept | None:
        """Return a message by its number; None if it was dropped, or was not added yet."""
        if not self.oldest_sequence <= sequence < self.next_sequence:
            return None
        place = sequence % self._size
        topic, segment, start = self._topics[place], self._segments[place], self._starts[place]
        end = start + self._lengths[place]
        payload = b"" if segment is None else segment[start:end]
        if sequence < self.oldest_sequence:
            return None  # it was dropped while we read it
        return Kept(sequence, topic, payload)

    def _give_up_oldest(self) -> None:
        place = self.oldest_sequence % self._size
        segment = self._segments[place]
        self.oldest_sequence += 1
        self.num_bytes -= self._lengths[place]
        self._segments[place] = None
        is_last = (
            self.oldest_sequence == self.next_sequence
            or self._segments[self.oldest_sequence % self._size] is not segment
        )
        if not is_last or segment is None:
            return
        if segment is self._segment:
            self._end = 0
        elif len(segment) == SEGMENT_BYTES:
            self._spare.append(segment)

    def _next_segment(self, length: int) -> mmap.mmap:
        if length > SEGMENT_BYTES:
            segment = mmap.mmap(-1, length, flags=_PRIVATE)
        elif self._spare:
            segment = self._spare.pop()
        else:
            segment = mmap.mmap(-1, SEGMENT_BYTES, flags=_PRIVATE)
            with contextlib.suppress(AttributeError, OSError):  # not on every platform
                segment.madvise(mmap.MADV_HUGEPAGE)
        self._segment = segment
        return segment
