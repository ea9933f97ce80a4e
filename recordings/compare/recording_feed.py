"""`RecordingFeed`: reads a recording, or some steps of it, once, for a comparison."""

import time
from collections.abc import Iterator

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.compare.side import RunFollower, Side, oldest_arrival
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.step_range import StepRange, bounds
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState

_CLOCKS_APART_NS = 1_000_000_000  # most that the recorder's and the engine's clocks differ


class RecordingFeed:
    """Reads a range of steps (`stretch`) from a recording. A `Feed`.

    `recording`: the recording. `close` closes it.

    Raises RecordingError: the recording has no step of the range.
    """

    def __init__(self, recording: Recording, name: str, slo: SLO, stretch: StepRange) -> None:
        self.name = name
        self.side: Side | None = None
        self.share: float | None = 0.0
        self.is_done = False
        self._recording = recording
        self._slo = slo
        self._note: str | None = None
        self._first, self._last = bounds(recording, stretch)
        self._reading = self._apply_messages()

    @property
    def note(self) -> str | None:
        return self._note or self._recording.message

    def read(self, until_s: float) -> bool:
        if self.is_done:
            return False
        try:
            for _ in self._reading:
                if time.monotonic() >= until_s:
                    return True
            self.is_done, self.share = True, 1.0
        except (RecordingError, OSError) as error:
            self._note, self.is_done = str(error), True
        return True

    def close(self) -> None:
        self.is_done = True
        self._recording.close()

    def _apply_messages(self) -> Iterator[None]:
        """Apply the messages one by one; yields after each.

        It begins at the oldest arrival among the requests that are live at the first step.
        """
        recording = self._recording
        found = recording.find_step(self._first - 1) if self._first else None
        before = found or Position(0, 0)  # the run begins here
        snapshot, position = recording.keyframe_before(before)
        state = SessionState.from_snapshot(snapshot)
        for each in messages(recording, position, snapshot.sequence):
            if each.position > before:
                break
            state.apply(each.message)
        if (oldest_ns := oldest_arrival(state.requests.values())) is not None:
            wall_ns = recording.info.wall_at(oldest_ns) - _CLOCKS_APART_NS
            start = min(before, recording.find_time(wall_ns))
            snapshot, position = recording.keyframe_before(start)
        # If the engine published no pauses, they are known since the beginning of the file.
        since_ns = max(recording.known_since_ns, known_since(snapshot))
        past = RunFollower(self._slo, SessionState.from_snapshot(snapshot), since_ns)
        for message, _, place, after_gap in messages(recording, position, snapshot.sequence):
            if self.side is None and place <= before:
                past.apply(message, after_gap)
                yield
                continue
            if self.side is None:
                self.side = Side(self.name, self._slo, past)
            if isinstance(message, StepRecord):
                if message.step > self._last:
                    self.side.is_cut = True
                    return
                self.share = (message.step - self._first + 1) / (self._last - self._first + 1)
            self.side.apply(message, after_gap)
            yield
