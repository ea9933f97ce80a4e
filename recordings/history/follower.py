"""`Follower`: reads what a timeline has kept, and goes on with what comes, at its own pace."""

import threading
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.recordings.history.ring.ring import replayed
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.session import SessionState


class Followed(NamedTuple):
    """One message; `after_gap` says that some before it were lost or are forgotten."""

    message: Telemetry
    after_gap: bool


class Follower:
    """The messages of one timeline from a step on. Belongs to one thread.

    Args:
        lock: guards the timeline.
        first: the first step wanted; None: the oldest kept.

    Attributes:
        state: right before the first message that `read` gives. Not changed afterwards.
        num_forgotten: messages that were given up before they were read.
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline, first: int | None) -> None:
        self._lock = lock
        self._timeline = timeline
        with lock:
            ring = timeline.ring
            segment, payloads = ring.segments[0], list[bytes]()
            found = None if first is None else ring.locate(first - 1)
            if found is not None:
                segment, place = found
                payloads = ring.payloads(segment, 0, place + 1)
            self._number = segment.first_number + len(payloads)
            keyframe = segment.keyframe
        self.state: SessionState = replayed(keyframe.restore(), payloads)
        self.num_forgotten = 0
        self._is_behind = False

    def read(self, limit: int) -> Iterator[Followed]:
        """Up to `limit` more messages; none when it has caught up."""
        with self._lock:
            payloads = self._payloads(limit)
            gap_steps = set(self._timeline.gaps.steps)
        for payload in payloads:
            self._number += 1
            message = wire.decode(payload)
            after_gap = self._is_behind
            if isinstance(message, StepRecord):
                after_gap = after_gap or message.step in gap_steps
            self._is_behind = False
            yield Followed(message, after_gap)

    def read_payloads(self, limit: int) -> list[bytes]:
        """As `read`, as they came; some before them may be forgotten."""
        with self._lock:
            payloads = self._payloads(limit)
        self._number += len(payloads)
        return payloads

    def sequences(self) -> dict[int, int]:
        """The numbers of the messages in which the steps in memory came."""
        with self._lock:
            columns = self._timeline.columns
            return dict(zip(columns.steps, columns.column("sequence"), strict=True))

    def num_lost(self) -> dict[int, int]:
        """Messages that never came, by the first step after them."""
        lost: dict[int, int] = {}
        with self._lock:
            for gap in self._timeline.gaps.found:
                if gap.before_step is not None:
                    lost[gap.before_step] = lost.get(gap.before_step, 0) + gap.num_messages
        return lost

    def _payloads(self, limit: int) -> list[bytes]:
        oldest = self._timeline.ring.segments[0].first_number
        if self._number < oldest:
            self.num_forgotten += oldest - self._number
            self._number, self._is_behind = oldest, True
        return self._timeline.ring.payloads_from(self._number, limit)

    def distance(self, other: "Follower") -> int:
        """How many messages it has to read to be where `other` is; 0 when it is there."""
        return max(0, other._number - self._number)

    @property
    def num_ahead(self) -> int:
        """Messages that are there to be read."""
        with self._lock:
            return max(0, self._timeline.ring.end_number - self._number)

    def is_of(self, timeline: Timeline) -> bool:
        """Whether it is this timeline that is followed."""
        return self._timeline is timeline
