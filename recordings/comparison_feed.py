"""What a `Side` is fed from: a recording, read once, or a history, which may go on growing."""

import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import Snapshot, StepRecord, Telemetry
from stepscope.recordings.comparison_side import Side
from stepscope.recordings.history import History
from stepscope.recordings.latency import SLO
from stepscope.recordings.loaded_chunk import KEYFRAME, Frame
from stepscope.recordings.mcap_index import RecordingError
from stepscope.recordings.reader import Position, Recording
from stepscope.recordings.session import SessionState

_BATCH = 64  # messages between two looks at the clock


class Stretch(NamedTuple):
    """Steps from `first` to `last`, both included; None is the end of what there is."""

    first: int | None = None
    last: int | None = None


class Feed(Protocol):
    """Fills one side. Belongs to one thread; what it says of itself may be read from any.

    Attributes:
        side: None until something was read.
        share: of what there is to read, 0..1; None for one that goes on.
        is_done: nothing more will come.
        note: what is missing or went wrong, in one line.
    """

    name: str

    @property
    def side(self) -> Side | None: ...

    @property
    def share(self) -> float | None: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def note(self) -> str | None: ...

    def read(self, until_s: float) -> bool:
        """Take what there is until that time of `time.monotonic`; whether anything was taken."""
        ...

    def close(self) -> None: ...


class RecordingFeed:
    """Reads a recording, or a stretch of it. Implements `Feed`.

    Args:
        recording: belongs to it from here on.

    Raises:
        RecordingError: there is no step of the stretch in it.
    """

    def __init__(self, recording: Recording, name: str, slo: SLO, stretch: Stretch) -> None:
        self.name = name
        self.side: Side | None = None
        self.share: float | None = 0.0
        self.is_done = False
        self._recording = recording
        self._slo = slo
        self._note: str | None = None
        first, last = recording.first_step, recording.last_step
        if first is None or last is None:
            raise RecordingError(f"{recording.path} holds no step")
        self._first = first if stretch.first is None else max(first, stretch.first)
        self._last = last if stretch.last is None else min(last, stretch.last)
        if self._first > self._last:
            raise RecordingError(
                f"{recording.path} holds steps {first:,} to {last:,}, none of those wanted"
            )
        self._begins_inside = self._first > first
        self._messages: Iterator[tuple[Frame, Position]] | None = None
        self._state = SessionState()
        self._sequence = 0

    @property
    def note(self) -> str | None:
        return self._note or self._recording.message

    def read(self, until_s: float) -> bool:
        if self.is_done:
            return False
        try:
            if self._messages is None:
                self._messages = self._begin()
            while time.monotonic() < until_s:
                for _ in range(_BATCH):
                    if not self._take_next():
                        self.is_done = True
                        self.share = 1.0
                        return True
        except (RecordingError, msgspec.DecodeError, OSError) as error:
            self._note, self.is_done = str(error), True
        return True

    def close(self) -> None:
        self.is_done = True
        self._recording.close()

    def _begin(self) -> Iterator[tuple[Frame, Position]]:
        before = self._recording.find_step(self._first - 1) if self._begins_inside else None
        snapshot, position = self._recording.keyframe_before(before or Position(0, 0))
        self._state = SessionState.from_snapshot(snapshot)
        self._sequence = snapshot.sequence
        frames = self._recording.frames(position, snapshot.sequence)
        if before is not None and position < before:
            for frame, place in frames:
                if (message := self._message(frame)) is not None:
                    self._state.apply(message[0])
                if place >= before:
                    break
        self.side = Side(self.name, self._slo, self._state)
        return frames

    def _message(self, frame: Frame) -> tuple[Telemetry, bool] | None:
        """Decoded, and whether messages before it are missing; None for one that says nothing."""
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            return None  # 'stepscope verify' tells of it
        after_gap = frame.sequence > self._sequence + 1 and frame.topic != wire.TOPICS[wire.Mark]
        self._sequence = max(self._sequence, frame.sequence)
        if frame.topic == KEYFRAME and not (isinstance(message, Snapshot) and after_gap):
            return None  # one of the recorder's own
        return message, after_gap

    def _take_next(self) -> bool:
        assert self._messages is not None
        assert self.side is not None
        found = next(self._messages, None)
        if found is None:
            return False
        message = self._message(found[0])
        if message is None:
            return True
        if isinstance(message[0], StepRecord):
            step = message[0].step
            if step > self._last:
                return False
            self.share = (step - self._first + 1) / (self._last - self._first + 1)
        self.side.take(*message)
        return True


class HistoryFeed:
    """Follows a history from a step on, or reads a stretch of it. Implements `Feed`."""

    def __init__(self, history: History, name: str, slo: SLO, stretch: Stretch) -> None:
        self.name = name
        self.side: Side | None = None
        self.is_done = False
        self._history = history
        self._slo = slo
        self._stretch = stretch
        self._follower = history.follow(stretch.first)
        self._note: str | None = None

    @property
    def share(self) -> float | None:
        if self.is_done:
            return 1.0
        if self.side is None:
            return 0.0
        num_read, num_ahead = self.side.version, self._follower.num_ahead
        return None if num_ahead < 2 * _BATCH else num_read / (num_read + num_ahead)

    @property
    def note(self) -> str | None:
        return self._note

    def read(self, until_s: float) -> bool:
        if self.is_done:
            return False
        if self.side is None:
            self.side = Side(self.name, self._slo, self._follower.state)
        taken = False
        while time.monotonic() < until_s:
            num_taken = 0
            for message, after_gap in self._follower.read(_BATCH):
                num_taken += 1
                last = self._stretch.last
                if isinstance(message, StepRecord) and last is not None and message.step > last:
                    self.is_done = True
                    return True
                self.side.take(message, after_gap)
            taken = taken or num_taken > 0
            if num_taken < _BATCH:
                break
        if not self._history.is_followed_by(self._follower):
            self._note = f"{self.name}: the engine started anew; this is the session before it"
            self.is_done = not taken
        return taken

    def close(self) -> None:
        self.is_done = True
