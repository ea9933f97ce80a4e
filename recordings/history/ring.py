"""`StepRing`: the raw messages of a session, in segments of consecutive messages.

It owns the segments. When there are too many steps or bytes, it forgets whole segments, oldest
first. Any state can be restored from a keyframe and at most `SEGMENT_STEPS` records. Finished
segments are compressed. The segments that were read last are also kept decompressed.

`StepCache`: decodes records and restores states of a ring, and caches the last ones.
"""

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.recordings.state.blocks import BlockMap, CompressedPayloads
from stepscope.recordings.state.session import SessionState

SEGMENT_STEPS = 128
SEGMENT_MESSAGES = 4 * SEGMENT_STEPS  # an idle engine sends no steps
_PAYLOAD_OVERHEAD = 64  # bytes of an object and its place in a list
_MAX_UNPACKED = 4  # segments whose decompressed payloads are kept
_VIEW_BYTES = 480  # estimated size of a copied request
_ENTRY_BYTES = 100  # estimated size of an entry for a shared request


class Keyframe(NamedTuple):
    """A stored state. Its blocks are compressed, because for many blocks they take most memory.

    `sequence` is the number of the message that led to the state. It is None if unknown, or if
    messages before it are missing and no snapshot has corrected the state.
    """

    state: SessionState
    blocks: CompressedPayloads | None
    sequence: int | None

    @classmethod
    def of(cls, state: SessionState, sequence: int | None) -> "Keyframe":
        blocks = None if state.blocks is None else state.blocks.pack()
        return cls(state.copy_without_blocks(), blocks, sequence)

    def restore(self) -> SessionState:
        state = self.state.copy()
        if self.blocks is not None:
            state.blocks = BlockMap.unpacked(self.blocks)
        return state

    @property
    def num_bytes(self) -> int:
        views = self.state.requests.values()
        num_own = sum(view.status == "running" for view in views)
        return (
            (0 if self.blocks is None else self.blocks.num_bytes)
            + num_own * _VIEW_BYTES
            + len(views) * _ENTRY_BYTES
        )


class Segment:
    """Consecutive messages, and a keyframe of the state before them."""

    __slots__ = ("first_number", "keyframe", "num_bytes", "payloads", "sequences", "step_places",
                 "steps")  # fmt: skip

    def __init__(self, keyframe: Keyframe, first_number: int) -> None:
        self.keyframe = keyframe
        self.first_number = first_number  # number of its first message in the ring
        self.payloads: list[bytes] | CompressedPayloads = []
        self.sequences = array("q")  # of the messages
        self.steps = array("q")
        self.step_places = array("q")  # where in `payloads` each step is
        self.num_bytes = keyframe.num_bytes

    def end(self) -> None:
        """Compress the messages. Call it when no more will be added."""
        if isinstance(self.payloads, list):
            self.payloads = CompressedPayloads(self.payloads)
            self.num_bytes = self.keyframe.num_bytes + self.payloads.num_bytes


class StepRing:
    """A list of segments, oldest first. One thread writes; readers hold its lock during a call.

    Readers may keep payloads and keyframes, which never change.

    `max_steps`, `max_bytes`: how much is kept at most, give or take one segment.
    """

    def __init__(
        self, state: SessionState, max_steps: int, max_bytes: int, sequence: int | None
    ) -> None:
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.num_steps = 0
        self.num_bytes = 0
        self.segments: list[Segment] = []
        self._unpacked: OrderedDict[int, list[bytes]] = OrderedDict()  # by first number
        self._begin(state, sequence)

    @property
    def first_step(self) -> int | None:
        return next((each.steps[0] for each in self.segments if each.steps), None)

    @property
    def end_number(self) -> int:
        """Number of the next message. Messages are numbered from 0 in order of arrival."""
        newest = self.segments[-1]
        return newest.first_number + len(newest.payloads)

    def append(
        self,
        sequence: int,
        payload: bytes,
        step: int | None,
        before: SessionState,
        true_after: int | None,
    ) -> bool:
        """Add a message. Returns whether old segments were forgotten for it.

        `true_after`: the number of the message that led to `before`; see `Keyframe`.
        """
        newest = self.segments[-1]
        is_full = len(newest.steps) >= SEGMENT_STEPS or len(newest.payloads) >= SEGMENT_MESSAGES
        segment = self._begin(before, true_after) if is_full else newest
        assert isinstance(segment.payloads, list)  # the newest one has not ended
        if step is not None:
            segment.steps.append(step)
            segment.step_places.append(len(segment.payloads))
            self.num_steps += 1
        segment.sequences.append(sequence)
        segment.payloads.append(payload)
        num_bytes = len(payload) + _PAYLOAD_OVERHEAD
        segment.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return self._evict()

    def locate(self, step: int) -> tuple[Segment, int] | None:
        """Segment of the last record at or before `step`, and its index there; None without one."""
        for index in range(bisect_right(self.segments, step, key=_first_step) - 1, -1, -1):
            segment = self.segments[index]
            if position := bisect_right(segment.steps, step):
                return segment, segment.step_places[position - 1]
        return None

    def payloads(self, segment: Segment, begin: int = 0, end: int | None = None) -> list[bytes]:
        """Messages of a segment with the indices [begin, end), in order."""
        payloads = segment.payloads
        if isinstance(payloads, list):
            return payloads[begin:end]
        number = segment.first_number
        if number not in self._unpacked:
            self._unpacked[number] = payloads.all()
            if len(self._unpacked) > _MAX_UNPACKED:
                self._unpacked.popitem(last=False)
        self._unpacked.move_to_end(number)
        return self._unpacked[number][begin:end]

    def messages_from(self, number: int, limit: int) -> list[tuple[int, bytes]]:
        """Sequence number and payload of at most `limit` messages, from the message `number` on."""
        index = bisect_right(self.segments, number, key=attrgetter("first_number")) - 1
        found: list[tuple[int, bytes]] = []
        for segment in self.segments[max(index, 0) :]:
            begin = max(0, number - segment.first_number)
            payloads = self.payloads(segment, begin, begin + limit - len(found))
            found += zip(islice(segment.sequences, begin, None), payloads, strict=False)
            if len(found) >= limit:
                break
        return found

    def forget_after(self, segment: Segment, place: int) -> None:
        del self.segments[self.segments.index(segment) + 1 :]
        num_kept = bisect_right(segment.step_places, place)
        segment.payloads = payloads = self.payloads(segment, 0, place + 1)
        del segment.sequences[place + 1 :], segment.steps[num_kept:], segment.step_places[num_kept:]
        num_bytes = sum(len(payload) + _PAYLOAD_OVERHEAD for payload in payloads)
        segment.num_bytes = segment.keyframe.num_bytes + num_bytes
        self._unpacked.clear()  # its keys, the numbers, will be reused
        self.num_steps = sum(len(each.steps) for each in self.segments)
        self.num_bytes = sum(each.num_bytes for each in self.segments)

    def _begin(self, state: SessionState, sequence: int | None) -> Segment:
        number = 0
        if self.segments:
            number, newest = self.end_number, self.segments[-1]
            self.num_bytes -= newest.num_bytes
            newest.end()
            self.num_bytes += newest.num_bytes
        segment = Segment(Keyframe.of(state, sequence), number)
        self.segments.append(segment)
        self.num_bytes += segment.num_bytes
        return segment

    def _evict(self) -> bool:
        evicted = False
        while len(self.segments) > 1 and (
            self.num_steps - len(self.segments[0].steps) >= self.max_steps
            or self.num_bytes > self.max_bytes
            or (evicted and self._begins_wrong())
        ):
            oldest = self.segments.pop(0)
            self.num_steps -= len(oldest.steps)
            self.num_bytes -= oldest.num_bytes
            evicted = True
        return evicted

    def _begins_wrong(self) -> bool:
        """Whether the first keyframe may be wrong while a later one, to begin with, is right."""
        first, *others = (segment.keyframe.sequence for segment in self.segments)
        return first is None and any(sequence is not None for sequence in others)


def replayed(state: SessionState, payloads: Iterable[bytes]) -> SessionState:
    """Apply messages to `state`, which is changed in place, and return it."""
    for payload in payloads:
        state.apply(wire.decode(payload))
    return state


def _first_step(segment: Segment) -> int:
    return segment.steps[0] if segment.steps else segment.keyframe.state.step + 1


_MAX_RECORDS = 512
_MAX_STATES = 4  # for the cursor, and for waits explained at the same time


class _Visited(NamedTuple):
    """A restored state. It is cached because the next request is often for the step after it."""

    segment: Segment
    place: int
    state: SessionState


class StepCache:
    """Caches of one ring, valid as long as messages are only added to it.

    Decoding and replaying happen outside the lock, on payloads that never change.
    """

    def __init__(self, lock: "threading.RLock", ring: StepRing) -> None:
        self._lock = lock
        self._ring = ring
        self._records: OrderedDict[int, wire.StepRecord] = OrderedDict()
        self._visited: list[_Visited] = []  # the last used one at the end

    def record(self, step: int) -> wire.StepRecord | None:
        with self._lock:
            if (known := self._records.get(step)) is not None:
                self._records.move_to_end(step)
                return known
            if (found := self._ring.locate(step)) is None:
                return None
            segment, place = found
            payload = self._ring.payloads(segment, place, place + 1)[0]
        record = wire.decode(payload)
        assert isinstance(record, wire.StepRecord)
        if record.step != step:
            return None
        with self._lock:
            self._records[step] = record
            while len(self._records) > _MAX_RECORDS:
                self._records.popitem(last=False)
        return record

    def state_at(self, step: int) -> SessionState:
        with self._lock:
            segment, place = self._ring.locate(step) or (self._ring.segments[0], -1)
        return self.state_after(segment, place)

    def state_after(self, segment: Segment, place: int) -> SessionState:
        """The state after a message of a segment; at place -1 the one before all of them."""
        if place < 0:
            return segment.keyframe.restore()
        with self._lock:
            known = [e for e in self._visited if e.segment is segment and e.place <= place]
            visited = max(known, key=attrgetter("place"), default=None)
            begin = 0 if visited is None else visited.place + 1
            payloads = self._ring.payloads(segment, begin, place + 1)
        if visited is None:
            state = segment.keyframe.restore()
        elif payloads:
            state = visited.state.copy()
        else:
            return visited.state
        state = replayed(state, payloads)
        with self._lock:
            # Replace `visited`, from which it was made: later requests continue from the end.
            others = [each for each in self._visited if each is not visited]
            self._visited = [*others[1 - _MAX_STATES :], _Visited(segment, place, state)]
        return state
