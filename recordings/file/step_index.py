"""`StepIndex`: finds the chunk that contains a step by reading only a few chunks.

The first and last step and time of a recording, read from the messages in its chunks.

The headers of chunks contain the times too, but without a checksum.
"""

import itertools
import sys

from stepscope.recordings.file.chunk_cache import ChunkCache, step_of


def mend_times(chunks: ChunkCache) -> None:
    """Correct the times of chunks whose headers contradict each other, from the messages inside."""
    last_ns = 0
    for number, place in enumerate(chunks.places):
        if place.is_cut or not last_ns <= place.start_ns <= place.end_ns:
            frames = chunks.load(number).frames
            place.start_ns = frames[0].log_ns if frames else last_ns
            place.end_ns = frames[-1].log_ns if frames else last_ns
        last_ns = place.end_ns


def end_step(chunks: ChunkCache, *, first: bool) -> int | None:
    """The first or the last readable step; None if there is no step."""
    numbers = range(len(chunks))
    for number in numbers if first else reversed(numbers):
        chunk = chunks.load(number)
        for place in chunk.step_places if first else reversed(chunk.step_places):
            if (step := step_of(chunk.frames[place].payload)) is not None:
                return step
    return None


def end_times(chunks: ChunkCache) -> tuple[int, int]:
    """Wall time of the first and the last message."""
    first, last = chunks.load(0).frames, chunks.load(len(chunks) - 1).frames
    return (
        first[0].log_ns if first else chunks.places[0].start_ns,
        last[-1].log_ns if last else chunks.places[-1].end_ns,
    )


class StepIndex:
    """The first steps of chunks, read on demand."""

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
