"""`ChunkCache`: the chunks of an open recording, decompressed on demand.

A chunk is a compressed part of an MCAP file. The chunks used last are cached, and damaged chunks
are noted. Any thread may call it.

`LoadedChunk`: the messages of one chunk, as received. Steps are unpacked on demand.

Texts for what is missing in a recording, as far as it has been read.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord
from stepscope.recordings.file.mcap.chunk import (
    bodies_at,
    channels,
    first_messages,
    message_at,
    message_places,
    read_chunk,
    read_stored_index,
)
from stepscope.recordings.file.mcap.format import PACKED_STEP, TOPICS
from stepscope.recordings.file.mcap.index import ChunkPlace, McapIndex
from stepscope.recordings.packing.steps import StepUnpacker

STEP = wire.TOPICS[StepRecord]
KEYFRAME = wire.TOPICS[Snapshot]
_PACKED = PACKED_STEP.encode()
_UNPACKABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class MessageFrame(NamedTuple):
    """One recorded message."""

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

    def bodies(self, first: int, last: int) -> list[tuple[int, bytes]]:
        """Sequence and payload of the messages between two indices, the last one excluded."""
        return bodies_at(self._records, self._begins[first:last])


class LoadedChunk:
    """The messages of a chunk, unpacked on demand. Reading them in order is quickest."""

    def __init__(self, records: bytes) -> None:
        topics = dict(enumerate(TOPICS, start=1)) | channels(records)
        names = {number: topic.encode() for number, topic in topics.items() if topic in TOPICS}
        begins, channel_ids = message_places(records)
        if not names.keys() >= set(channel_ids):  # a later version wrote it
            known = [place for place, each in enumerate(channel_ids) if each in names]
            begins = array("I", [begins[place] for place in known])
            channel_ids = array("H", [channel_ids[place] for place in known])
        packed_ids = {number for number, topic in names.items() if topic == _PACKED}
        names |= dict.fromkeys(packed_ids, STEP)
        step_ids = {number for number, topic in names.items() if topic == STEP}
        places = list(enumerate(channel_ids))
        self._packed = {place for place, each in places if each in packed_ids}
        # Indices of the steps.
        self.step_places = [place for place, each in places if each in step_ids]
        # The messages as stored, where steps may be packed. Use them for topics, sequences and
        # times.
        self.frames = Frames(records, begins, [names[each] for each in channel_ids])
        self._unpacker = StepUnpacker()
        self._unpacked = 0  # the unpacker was fed all steps before this index

    def last_keyframe(self, end: int) -> int | None:
        """Index of the last keyframe before the message with index `end`; None without one."""
        topics = self.frames.topics
        return next((at for at in range(end - 1, -1, -1) if topics[at] == KEYFRAME), None)

    def __len__(self) -> int:
        return len(self.frames)

    def is_packed(self, place: int) -> bool:
        return place in self._packed

    def end_of_run(self, place: int, last: int) -> int:
        """Index of the first message from `place` on that is no packed step, at most `last`."""
        packed = self._packed
        while place < last and place in packed:
            place += 1
        return place

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
        return frame._replace(payload=payload)

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

_STEP_TOPICS = (STEP, KEYFRAME, PACKED_STEP.encode())


class ChunkCache:
    """Reads and caches the chunks of one file.

    `stream`: seekable; the caller closes it.
    """

    def __init__(self, stream: IO[bytes], places: list[ChunkPlace]) -> None:
        self.places = places  # where each chunk lies in the file, in order
        self.damaged: set[int] = set()  # numbers of the chunks known to be damaged
        # First and last readable step of each chunk that was loaded.
        self.ends: dict[int, tuple[int, int]] = {}
        self._stream = stream
        self._lock = threading.Lock()
        self._loaded: OrderedDict[int, LoadedChunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def load(self, number: int) -> LoadedChunk:
        """The readable messages of a chunk, from the cache if possible.

        Raises OSError: the file cannot be read.
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

    def stored_index(self, number: int) -> bytes | None:
        """See `Recording.stored_index`."""
        with self._lock:
            return read_stored_index(self._stream, self.places[number])

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


REPAIR_HINT = "; 'stepscope verify --repair' makes a whole file of it"


def missing_text(index: McapIndex, chunks: ChunkCache, last_step: int | None) -> str | None:
    """Text for what is missing in a file, why, and what helps; None for a whole file."""
    parts = []
    if index.why_incomplete is not None:
        what = index.why_incomplete
        end = "" if last_step is None else f" after step {last_step:,}"
        if index.is_being_written:
            what += f"; what comes{end} is not written yet"
        elif not index.was_closed:
            what += f"; what came{end} is missing"
        if index.num_lost_bytes:
            what += f" ({index.num_lost_bytes:,} bytes unreadable)"
        parts.append(what)
    if chunks.damaged:
        parts.append(damage_text(chunks))
    if not parts:
        return None
    return "; ".join(parts) + ("" if index.is_being_written else REPAIR_HINT)


def damage_text(chunks: ChunkCache) -> str:
    """Text for how many chunks are damaged, and which steps are missing as a result.

    Reads nothing, so it works at any time, even after the file was closed.
    """
    damaged = sorted(chunks.damaged)
    verb = "is" if len(damaged) == 1 else "are"
    said = f"{len(damaged)} of {len(chunks)} chunks {verb} damaged"
    gaps: list[range] = []
    tail = ""
    for number in damaged:
        last, following = _last_step(chunks, number), chunks.ends.get(number + 1)
        if number + 1 == len(chunks):
            end = "" if last is None else f" after step {last:,}"
            tail = f"; what came{end} is missing"
        elif last is None or following is None:
            return f"{said}; 'stepscope verify' says what is missing"
        elif following[0] > last + 1:
            gaps.append(range(last + 1, following[0]))
    if len(gaps) == 1:
        said += f"; steps {gaps[0][0]:,} to {gaps[0][-1]:,} are missing"
    elif gaps:
        first, last = gaps[0][0], gaps[-1][-1]
        said += f"; {sum(map(len, gaps)):,} steps from {first:,} to {last:,} are missing"
    return said + tail


def nothing_left(chunks: ChunkCache) -> str:
    """Text for why a file cannot be shown: no loaded chunk contains a readable keyframe."""
    damaged = [chunks.places[number] for number in sorted(chunks.damaged)]
    first = damaged[0]
    if len(chunks) == 1:
        where = f"its only chunk (byte {first.offset:,}, {first.length:,} bytes) is damaged"
    else:
        verb = "is" if len(damaged) == 1 else "are"
        where = f"{len(damaged)} of its {len(chunks)} chunks {verb} damaged, "
        where += f"{'the first of them ' * (len(damaged) > 1)}at byte {first.offset:,}"
    return f"{where}; no keyframe can be read, so nothing can be shown"


def _last_step(chunks: ChunkCache, number: int) -> int | None:
    """The last readable step of a chunk, or else of the chunk before it; None if unknown."""
    ends = chunks.ends.get(number) or chunks.ends.get(number - 1)
    return None if ends is None else ends[1]
