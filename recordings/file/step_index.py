"""`StepIndex`: finds the chunk that contains a step by reading only a few chunks."""

import itertools
import sys

from stepscope.recordings.file.chunk_cache import ChunkCache


class StepIndex:
    """The first steps of chunks, read on demand.

    Args:
        first_step, last_step: the first and last step of the recording.
    """

    def __init__(self, chunks: ChunkCache, first_step: int | None, last_step: int | None) -> None:
        self._chunks = chunks
        self._first_step = first_step or 0
        self._last_step = last_step or 0
        self._first_steps: dict[int, int | None] = {}

    def num_chunks_up_to(self, step: int) -> int:
        """How many chunks begin at or before a step.

        Interpolates between known chunks as if steps were spread evenly, and bisects if that does
        not converge quickly.
        """
        low, low_step = -1, self._first_step - 1  # chunk that begins at or before the step
        high, high_step = len(self._chunks), self._last_step + 1  # chunk that begins after the step
        for number, first in self._first_steps.items():
            if first is None:
                continue
            if first <= step:
                if number > low:
                    low, low_step = number, first
            elif number < high:
                high, high_step = number, first
        for attempt in itertools.count():
            if high - low <= 1:
                return low + 1
            share = (step - low_step) / max(1, high_step - low_step) if attempt < 6 else 0.5
            number = min(max(low + round(share * (high - low)), low + 1), high - 1)
            first = self._first_step_from(number)
            if first <= step:
                low, low_step = number, first
            else:
                high, high_step = number, first
        raise AssertionError

    def _first_step_from(self, number: int) -> int:
        """The first step of a chunk or of the next chunk with a step; `sys.maxsize` without one."""
        for chunk in range(number, len(self._chunks)):
            if chunk not in self._first_steps:
                self._first_steps[chunk] = self._chunks.first_step(chunk)
            if (step := self._first_steps[chunk]) is not None:
                return step
        return sys.maxsize
