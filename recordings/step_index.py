"""`StepIndex`: which chunk of a recording holds a step, found by looking into few of them."""

import sys
from bisect import bisect_right

from stepscope.recordings.chunk_cache import ChunkCache


class StepIndex:
    """First steps of chunks, as far as anybody has asked.

    Args:
        first_step, last_step: of the recording.
    """

    def __init__(self, chunks: ChunkCache, first_step: int | None, last_step: int | None) -> None:
        self._chunks = chunks
        self._first_step = first_step or 0
        self._last_step = last_step or 0
        self._first_steps: dict[int, int | None] = {}

    def num_chunks_up_to(self, step: int) -> int:
        """How many chunks begin at or before a step. Looks into few: steps are spread evenly."""
        num_chunks = len(self._chunks)
        share = (step - self._first_step) / max(1, self._last_step - self._first_step)
        low = high = min(max(0, round(share * num_chunks)), num_chunks)
        width = 1
        while low > 0 and self._first_step_from(low - 1) > step:
            high = low
            low = max(0, low - width)
            width *= 2
        while high < num_chunks and self._first_step_from(high) <= step:
            low = high
            high = min(num_chunks, high + width)
            width *= 2
        return bisect_right(range(num_chunks), step, low, high, key=self._first_step_from)

    def _first_step_from(self, number: int) -> int:
        """Where steps begin in a chunk (or in those after it): none of it is earlier."""
        for chunk in range(number, len(self._chunks)):
            if chunk not in self._first_steps:
                self._first_steps[chunk] = self._chunks.first_step(chunk)
            if (step := self._first_steps[chunk]) is not None:
                return step
        return sys.maxsize
