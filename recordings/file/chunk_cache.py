"""`ChunkCache`: the chunks of an open recording, decompressed on demand.

A chunk is a compressed part of an MCAP file. The chunks used last are cached, and damaged chunks
are noted. Any thread may call it.
"""

import threading
from collections import OrderedDict
from typing import IO

from stepscope.recordings.file.loaded_chunk import KEYFRAME, STEP, LoadedChunk, step_of
from stepscope.recordings.file.mcap.chunk import first_messages, read_chunk
from stepscope.recordings.file.mcap.format import PACKED_STEP, TOPICS
from stepscope.recordings.file.mcap.index import ChunkPlace

MAX_CHUNKS = 16  # most chunks kept decompressed

_STEP_TOPICS = (STEP, KEYFRAME, PACKED_STEP.encode())


class ChunkCache:
    """Reads and caches the chunks of one file.

    Attributes:
        places: where each chunk lies in the file, in order.
        damaged: numbers of the chunks known to be damaged.
        ends: first and last readable step of each chunk that was loaded.

    Args:
        stream: seekable; the caller closes it.
    """

    def __init__(self, stream: IO[bytes], places: list[ChunkPlace]) -> None:
        self.places = places
        self.damaged: set[int] = set()
        self.ends: dict[int, tuple[int, int]] = {}
        self._stream = stream
        self._lock = threading.Lock()
        self._loaded: OrderedDict[int, LoadedChunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def load(self, number: int) -> LoadedChunk:
        """The readable messages of a chunk, from the cache if possible.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lock:
            if number in self._loaded:
                self._loaded.move_to_end(number)
                return self._loaded[number]
            place = self.places[number]
            records, is_damaged = read_chunk(self._stream, place)
            if is_damaged and not place.is_cut:
                self.damaged.add(number)
            chunk = self._loaded[number] = LoadedChunk(records)
            if number not in self.ends and (ends := _ends(chunk)) is not None:
                self.ends[number] = ends
            if len(self._loaded) > MAX_CHUNKS:
                self._loaded.popitem(last=False)
            return chunk

    def first_step(self, number: int) -> int | None:
        """The first step of a chunk, read without loading it; None if it has none.

        If the chunk begins with a keyframe, this is the step that follows the state in the
        keyframe.
        """
        with self._lock:
            for message in first_messages(self._stream, self.places[number]):
                topic = TOPICS[message.channel_id - 1] if message.channel_id <= len(TOPICS) else ""
                if topic.encode() in _STEP_TOPICS:
                    step = step_of(message.payload)
                    return step if step is None or topic.encode() != KEYFRAME else step + 1
        return None


def _ends(chunk: LoadedChunk) -> tuple[int, int] | None:
    places = chunk.step_places
    if not places:
        return None
    first, last = (step_of(chunk.frames[place].payload) for place in (places[0], places[-1]))
    return None if first is None or last is None else (first, last)
