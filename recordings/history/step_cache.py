"""`StepCache`: decodes records and restores earlier states of a timeline, and caches the last ones.

Decoding and replaying happen outside the timeline's lock, on payloads that never change.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.history.ring import Segment, replayed
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.session import SessionState

MAX_RECORDS = 512  # cached decoded records
MAX_STATES = 4  # cached states: for the cursor, and for waits explained at the same time


class _Visited(NamedTuple):
    """A restored state. It is cached because the next request is often for the step after it."""

    segment: Segment
    place: int
    state: SessionState


class StepCache:
    """Caches of one timeline. They are valid as long as steps are only added to it."""

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._visited: list[_Visited] = []  # the last used one at the end

    def record(self, step: int) -> StepRecord | None:
        with self._lock:
            known = self._records.get(step)
            if known is not None:
                self._records.move_to_end(step)
                return known
            payload = self._timeline.ring.payload(step)
        if payload is None:
            return None
        record = wire.decode(payload)
        assert isinstance(record, StepRecord)
        self.keep(record)
        return record

    def keep(self, record: StepRecord) -> None:
        with self._lock:
            self._records[record.step] = record
            while len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)

    def state_at(self, step: int) -> SessionState:
        with self._lock:
            ring = self._timeline.ring
            found = ring.locate(step)
            if found is None:
                return ring.segments[0].keyframe.restore()
            segment, place = found
            known = [e for e in self._visited if e.segment is segment and e.place <= place]
            visited = max(known, key=lambda each: each.place, default=None)
            begin = 0 if visited is None else visited.place + 1
            payloads = ring.payloads(segment, begin, place + 1)
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
            self._visited = [*others[1 - MAX_STATES :], _Visited(segment, place, state)]
        return state
