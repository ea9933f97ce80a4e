"""`LoadedChunk`: the messages of one chunk, as received. Steps are unpacked on demand."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord
from stepscope.recordings.file.mcap.chunk import (
    RawMessage,
    bodies_at,
    channels,
    message_at,
    message_places,
)
from stepscope.recordings.file.mcap.format import PACKED_STEP, TOPICS
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


class Frames(Sequence[MessageFrame]):
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

    @overload
    def __getitem__(self, place: int) -> MessageFrame: ...

    @overload
    def __getitem__(self, place: slice) -> list[MessageFrame]: ...

    def __getitem__(self, place: int | slice) -> MessageFrame | list[MessageFrame]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        _, sequence, log_ns, payload = message_at(self._records, self._begins[place])
        return MessageFrame(self.topics[place], sequence, log_ns, payload)

    def bodies(self, first: int, last: int) -> list[tuple[int, bytes]]:
        """Sequence and payload of the messages between two indices, the last one excluded."""
        return bodies_at(self._records, self._begins[first:last])

    def places_of(self, word: bytes) -> Iterator[int]:
        """Indices of the messages that contain these bytes, in order."""
        records, begins = self._records, self._begins
        at = records.find(word)
        while at >= 0:
            place = bisect_right(begins, at) - 1
            if place >= 0:
                yield place
            if place + 1 >= len(begins):
                return
            at = records.find(word, begins[place + 1])


class LoadedChunk:
    """The messages of a chunk, unpacked on demand. Reading them in order is quickest.

    Attributes:
        frames: the messages as stored, where steps may be packed. Use them for topics, sequences
            and times.
        step_places: indices of the steps.
    """

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
        self.step_places = [place for place, each in places if each in step_ids]
        self.frames = Frames(records, begins, [names[each] for each in channel_ids])
        self._records = records
        self._unpacker = StepUnpacker()
        self._unpacked = 0  # the unpacker was fed all steps before this index

    @property
    def messages(self) -> list[RawMessage]:
        """All messages, as stored in the file."""
        return [message_at(self._records, begin) for begin in message_places(self._records)[0]]

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
