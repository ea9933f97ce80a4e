"""`ChunkCache`: the chunks of an open recording, decompressed on demand.

The chunks used last are cached, and damaged chunks are noted. `LoadedChunk`: the messages of one
chunk, as received; steps are unpacked on demand.

The first and the last step and time of a recording are read from its messages, as the heads of
chunks, which tell times too, have no checksum.
"""

import sys
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord
from stepscope.recordings.file.mcap.chunk import (
    first_messages,
    message_at,
    message_places,
    read_chunk,
    read_stored_index,
)
from stepscope.recordings.file.mcap.format import PACKED_STEP, TOPICS
from stepscope.recordings.file.mcap.index import ChunkPlace
from stepscope.recordings.packing import StepUnpacker

STEP = wire.TOPICS[StepRecord]
KEYFRAME = wire.TOPICS[Snapshot]
_PACKED_ID = 1 + TOPICS.index(PACKED_STEP)
# By channel id; packed steps are steps, too.
_TOPIC_OF = {n: topic.encode() for n, topic in enumerate(TOPICS, start=1)} | {_PACKED_ID: STEP}
_UNPACKABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class MessageFrame(NamedTuple):
    topic: bytes
    sequence: int
    log_ns: int  # wall time
    payload: bytes


class _StepHead(msgspec.Struct):
    step: int


_step_head = msgspec.msgpack.Decoder(_StepHead)


def step_of(payload: bytes) -> int | None:
    """The step number in a step message (packed or not) or keyframe; None if undecodable."""
    try:
        return _step_head.decode(payload).step
    except msgspec.DecodeError:
        return None


class Frames:
    """The messages of a chunk as a sequence of `MessageFrame`s, each built when it is asked for.

    A seek needs few of the thousand messages of a chunk.
    """

    __slots__ = ("_begins", "_records", "topics")

    def __init__(self, records: bytes, begins: "array[int]", topics: list[bytes]) -> None:
        self.topics = topics
        self._records = records
        self._begins = begins

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[MessageFrame]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> MessageFrame:
        _, sequence, log_ns, payload = message_at(self._records, self._begins[place])
        return MessageFrame(self.topics[place], sequence, log_ns, payload)


class LoadedChunk:
    """The messages of a chunk, unpacked on demand. Reading them in order is quickest."""

    def __init__(self, records: bytes) -> None:
        begins, channel_ids = message_places(records)
        if not _TOPIC_OF.keys() >= set(channel_ids):  # a later version wrote it
            known = [place for place, each in enumerate(channel_ids) if each in _TOPIC_OF]
            begins = array("I", [begins[place] for place in known])
            channel_ids = array("H", [channel_ids[place] for place in known])
        self._packed = {place for place, each in enumerate(channel_ids) if each == _PACKED_ID}
        topics = [_TOPIC_OF[each] for each in channel_ids]
        # Indices of the steps.
        self.step_places = [place for place, topic in enumerate(topics) if topic == STEP]
        # The messages as stored, where steps may be packed. Use them for topics, sequences and
        # times.
        self.frames = Frames(records, begins, topics)
        self._unpacker = StepUnpacker()
        self._unpacked = 0  # the unpacker was fed all steps before this index

    def end_steps(self) -> tuple[int | None, int | None]:
        """The first and the last readable step; None if there is none."""
        ends = []
        for places in (self.step_places, reversed(self.step_places)):
            steps = (step_of(self.frames[place].payload) for place in places)
            ends.append(next((step for step in steps if step is not None), None))
        return ends[0], ends[1]

    def __len__(self) -> int:
        return len(self.frames)

    def frame(self, place: int) -> MessageFrame | None:
        """The message as received from the engine; None if it cannot be unpacked (damage)."""
        frame = self.frames[place]
        if place not in self._packed:
            return frame
        try:
            self._go_to(place)
            payload = self._unpacker.unpack(frame.payload)
        except _UNPACKABLE:
            return None
        self._unpacked = place + 1
        return MessageFrame(frame.topic, frame.sequence, frame.log_ns, payload)

    def _go_to(self, place: int) -> None:
        """Feed the unpacker the earlier steps that the step at `place` depends on."""
        frames = self.frames
        first = place
        while first > 0 and first != self._unpacked:
            first -= 1
            if frames.topics[first] == STEP and first not in self._packed:
                break
        for each in range(first, place):
            if each in self._packed:
                self._unpacker.skip(frames[each].payload)
            elif frames.topics[each] == STEP:
                self._unpacker.take(frames[each].payload)
        self._unpacked = place


MAX_CHUNKS = 16  # most chunks kept decompressed


class ChunkCache:
    """Reads and caches the chunks of one file. `stream`: seekable; the caller closes it."""

    def __init__(self, stream: IO[bytes], places: list[ChunkPlace]) -> None:
        self.places = places  # where each chunk lies in the file, in order
        self.damaged: set[int] = set()  # numbers of the chunks known to be damaged
        self._stream = stream
        self._lock = threading.Lock()
        self._loaded: OrderedDict[int, LoadedChunk] = OrderedDict()
        self._first_steps: dict[int, int | None] = {}  # of chunks that were looked into

    def __len__(self) -> int:
        return len(self.places)

    def load(self, number: int) -> LoadedChunk:
        """The readable messages of a chunk, from the cache if possible."""
        with self._lock:
            if number in self._loaded:
                self._loaded.move_to_end(number)
                return self._loaded[number]
            place = self.places[number]
            records, is_damaged = read_chunk(self._stream, place)
            if is_damaged and not place.is_cut:
                self.damaged.add(number)
            chunk = self._loaded[number] = LoadedChunk(records)
            if len(self._loaded) > MAX_CHUNKS:
                self._loaded.popitem(last=False)
            return chunk

    def stored_index(self, number: int) -> bytes | None:
        """The index of a chunk as the recorder wrote it; None if there is none.

        Raises ValueError: it is damaged.
        """
        with self._lock:
            return read_stored_index(self._stream, self.places[number])

    def num_up_to(self, step: int) -> int:
        """How many chunks begin at or before a step. Looks into few of them, by bisection."""
        return bisect_right(range(len(self)), step, key=self._first_step_from)

    def _first_step_from(self, number: int) -> int:
        """The first step of a chunk or of the next chunk with a step; `sys.maxsize` without one."""
        for chunk in range(number, len(self)):
            if chunk not in self._first_steps:
                self._first_steps[chunk] = self._first_step(chunk)
            if (step := self._first_steps[chunk]) is not None:
                return step
        return sys.maxsize

    def _first_step(self, number: int) -> int | None:
        """The first step of a chunk, or after its first keyframe; None if it has none.

        Read without loading the chunk.
        """
        with self._lock:
            for channel_id, payload in first_messages(self._stream, self.places[number]):
                topic = _TOPIC_OF.get(channel_id)
                if topic in (STEP, KEYFRAME):
                    step = step_of(payload)
                    return step if step is None or topic == STEP else step + 1
        return None

    def mend_times(self) -> None:
        """Correct times of chunks whose headers contradict each other, from the messages inside."""
        last_ns = 0
        for number, place in enumerate(self.places):
            if place.is_cut or not last_ns <= place.start_ns <= place.end_ns:
                frames = self.load(number).frames
                place.start_ns = frames[0].log_ns if frames else last_ns
                place.end_ns = frames[-1].log_ns if frames else last_ns
            last_ns = place.end_ns
