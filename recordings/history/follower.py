"""`Follower`: reads the messages of a session in memory, stored ones first, at its own pace."""

import threading
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.recordings.history.ring import replayed
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.session import SessionState


class Followed(NamedTuple):
    message: Telemetry
    after_gap: bool  # whether messages right before this message were lost or forgotten


class Follower:
    """Reads the messages of one timeline (the data kept of one engine) from a step on.

    Belongs to one thread.

    `first`: the first step to read; None: the oldest in memory.
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline, first: int | None) -> None:
        self._lock = lock
        self.timeline = timeline
        with lock:
            ring = timeline.ring
            segment, payloads = ring.segments[0], list[bytes]()
            found = None if first is None else ring.locate(first - 1)
            if found is not None:
                segment, place = found
                payloads = ring.payloads(segment, 0, place + 1)
            self._number = segment.first_number + len(payloads)
            keyframe = segment.keyframe
        # The state right before the first message of `read`. Never changed.
        self.state: SessionState = replayed(keyframe.restore(), payloads)
        self.num_forgotten = 0  # number of messages that memory dropped before they were read
        self._is_behind = False

    def read(self, limit: int) -> Iterator[Followed]:
        """Yield the next messages, at most `limit`; none if all were read."""
        with self._lock:
            gap_steps = set(self.timeline.gaps.steps)
            payloads = self.read_payloads(limit)
            is_behind, self._is_behind = self._is_behind, False
        for payload in payloads:
            message = wire.decode(payload)
            is_after = isinstance(message, StepRecord) and message.step in gap_steps
            yield Followed(message, is_behind or is_after)
            is_behind = False

    def read_payloads(self, limit: int) -> list[bytes]:
        """Return the next messages undecoded, at most `limit`.

        Unlike `read`, it does not tell whether messages were lost or forgotten before them.
        """
        with self._lock:
            ring = self.timeline.ring
            oldest = ring.segments[0].first_number
            if self._number < oldest:
                self.num_forgotten += oldest - self._number
                self._number, self._is_behind = oldest, True
            payloads = ring.payloads_from(self._number, limit)
        self._number += len(payloads)
        return payloads

    def sequences(self) -> dict[int, int]:
        with self._lock:
            columns = self.timeline.columns
            return dict(zip(columns.steps, columns.column("sequence"), strict=True))

    def num_lost(self) -> dict[int, int]:
        """Number of messages lost in each gap, by the first step after the gap."""
        lost: dict[int, int] = {}
        with self._lock:
            for gap in self.timeline.gaps.found:
                if gap.before_step is not None:
                    lost[gap.before_step] = lost.get(gap.before_step, 0) + gap.num_messages
        return lost

    def distance(self, other: "Follower") -> int:
        return max(0, other._number - self._number)

    @property
    def num_ahead(self) -> int:
        with self._lock:
            return max(0, self.timeline.ring.end_number - self._number)
