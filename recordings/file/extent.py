"""The first and last step and time of a recording, read from the messages in its chunks.

The headers of chunks contain the times too, but without a checksum.
"""

from stepscope.recordings.file.chunk_cache import ChunkCache
from stepscope.recordings.file.loaded_chunk import step_of


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
