"""`RecordingFeed`: reads a recording, or some steps of it, once, for a comparison."""

import time
from collections.abc import Iterator

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord, Telemetry
from stepscope.recordings.compare.side.feed import BATCH, Stretch
from stepscope.recordings.compare.side.side import Follower, Side, oldest_arrival
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.chunk_cache import KEYFRAME, MessageFrame
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState

_CLOCKS_APART_NS = 1_000_000_000  # most that the recorder's and the engine's clocks differ


class RecordingFeed:
    """Reads a range of steps (`stretch`) from a recording. Implements `Feed`.

    Args:
        recording: the recording. `close` closes it.

    Raises:
        RecordingError: the recording has no step of the range.
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
        self._messages: Iterator[tuple[MessageFrame, Position]] | None = None
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
                for _ in range(BATCH):
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

    def _begin(self) -> Iterator[tuple[MessageFrame, Position]]:
        recording, before = self._recording, Position(0, 0)
        if self._begins_inside:
            before = recording.find_step(self._first - 1) or before
        snapshot, position = recording.keyframe_before(before)
        # Begin at the oldest arrival among the requests that are live at the first step.
        state = SessionState.from_snapshot(snapshot)
        for message, _ in self._messages_until(before, snapshot, position):
            state.apply(message)
        if (oldest_ns := oldest_arrival(state.requests.values())) is not None:
            info = recording.info
            wall_ns = info.wall_ns + oldest_ns - info.monotonic_ns
            start = min(before, recording.find_time(wall_ns - _CLOCKS_APART_NS))
            snapshot, position = recording.keyframe_before(start)
        state = SessionState.from_snapshot(snapshot)
        past = Follower(self._slo, state, self._since(snapshot))
        for message, after_gap in self._messages_until(before, snapshot, position):
            past.take(message, after_gap)
        self.side = Side(self.name, self._slo, past)
        return recording.frames(max(before, position), self._sequence)

    def _messages_until(
        self, before: Position, snapshot: Snapshot, position: Position
    ) -> Iterator[tuple[Telemetry, bool]]:
        """The messages from a keyframe on, and whether some are missing before each."""
        self._sequence = snapshot.sequence
        if position < before:
            for frame, place in self._recording.frames(position, snapshot.sequence):
                if (message := self._message(frame)) is not None:
                    yield message
                if place >= before:
                    break

    def _since(self, snapshot: Snapshot) -> int:
        """Engine time from which all pauses are known if reading begins at a keyframe.

        If the engine published no pauses, this is the beginning of the file.
        """
        return max(self._recording.known_since_ns, known_since(snapshot))

    def _message(self, frame: MessageFrame) -> tuple[Telemetry, bool] | None:
        """Decode a frame. Returns the message, and whether messages before it are missing.

        None for a frame to be ignored: a broken message, or a keyframe added by the recorder.
        """
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            return None  # 'stepscope verify' reports it
        after_gap = frame.sequence > self._sequence + 1 and frame.topic != wire.TOPICS[wire.Mark]
        self._sequence = max(self._sequence, frame.sequence)
        if frame.topic == KEYFRAME and not (isinstance(message, Snapshot) and after_gap):
            return None  # a keyframe that the recorder itself added
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
                self.side.is_cut = True
                return False
            self.share = (step - self._first + 1) / (self._last - self._first + 1)
        self.side.take(*message)
        return True
