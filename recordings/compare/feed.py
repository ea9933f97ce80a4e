"""`Feed`: reads a run into a `Side`, which does not know from where; `HistoryFeed`: from memory.

Only one thread may call `read`; any thread may read the attributes of a feed:

    side: the run as read so far; None until something was read.
    share: how much has been read, 0..1; None for a live session with nothing more to read.
    is_done: whether no more messages will come.
    note: what is missing or went wrong, in one line; None if nothing.
"""

import time
from typing import TYPE_CHECKING, TypeAlias, Union

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.compare.side import RunFollower, Side, oldest_arrival
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.latency import SLO

if TYPE_CHECKING:
    from stepscope.recordings.compare.recording_feed import RecordingFeed  # needs mcap

Feed: TypeAlias = Union["HistoryFeed", "RecordingFeed"]

BATCH = 64  # messages between two checks of the clock


class HistoryFeed:
    """Reads steps of a history, and follows it if the range has no last step."""

    def __init__(self, history: History, name: str, slo: SLO, stretch: StepRange) -> None:
        self.name = name
        self.side: Side | None = None
        self.is_done = False
        self._history = history
        self._slo = slo
        self._stretch = stretch
        self._begin = self._reader = history.follow(stretch.first)
        # Read from the oldest arrival among the requests that are live when the stretch begins.
        oldest_ns = oldest_arrival(self._begin.state.requests.values())
        first = None if oldest_ns is None else history.step_at(oldest_ns)
        if first is not None and (earlier := history.follow(first)).number < self._begin.number:
            self._reader = earlier
        since_ns = max(history.known_since_ns, known_since(self._reader.state))
        self._has_all = False  # the last read ended because there was no more
        self._past = RunFollower(slo, self._reader.state, since_ns)
        self.note: str | None = None

    @property
    def share(self) -> float | None:
        if self.is_done:
            return 1.0
        if self.side is None:
            return 0.0
        if self._has_all:
            return None
        num_read, num_ahead = self.side.version, self._reader.num_ahead
        return num_read / max(1, num_read + num_ahead)

    def read(self, until_s: float) -> bool:
        """Read until `time.monotonic()` reaches `until_s`. Returns whether anything was read."""
        if self.is_done:
            return False
        taken = self._has_all = False
        while time.monotonic() < until_s and not self._has_all:
            num_before = max(0, self._begin.number - self._reader.number)
            if not num_before and self.side is None:
                self.side = Side(self.name, self._slo, self._past)
            num_taken, last = 0, self._stretch.last
            for message, after_gap, _, _ in self._reader.read(min(BATCH, num_before) or BATCH):
                num_taken += 1
                if self.side is None:
                    self._past.apply(message, after_gap)
                    continue
                if isinstance(message, StepRecord) and last is not None and message.step > last:
                    self.side.is_cut = self.is_done = True
                    return True
                self.side.apply(message, after_gap)
            taken = taken or num_taken > 0
            self._has_all = self.side is not None and num_taken < BATCH
        if not self._history.is_followed_by(self._reader):
            self.note = f"{self.name}: the engine restarted; this is the session before it"
            self.is_done = not taken
        return taken

    def close(self) -> None:
        self.is_done = True
