"""Seeking in a recording: the state at a position, and where the steps for a screen begin.

Builds a history from a stretch of a recording, for a replay to show after a seek.

`Filler`: fills a history from a file without examining every row.

The result is the same as with `History.append` for each message, in a sixth of the time: see
`FastForward`.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord
from stepscope.recordings.file.chunk_cache import LoadedChunk
from stepscope.recordings.file.reader import Position, Recording, whole_sequence
from stepscope.recordings.history.history import History
from stepscope.recordings.history.ring.fast_forward import FastForward, has_no_request
from stepscope.recordings.history.ring.segment import PackedRecord, PackedStep, decode_packed
from stepscope.recordings.state.session import SessionState

# Errors from damage that checksums missed, or from a file that another program wrote.
DAMAGE = (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, OverflowError)

TURN_MESSAGES = 64  # messages between two yields, or two calls of `turn`


class Filler:
    """Fills one history from a position in the file on. Nothing else may use the history meanwhile.

    Args:
        history: must hold only the state at `position`.
        forward: the object that computed that state; None if there is a keyframe just before
            `position`.
        sequence: number of the message before `position`.
    """

    def __init__(
        self,
        recording: Recording,
        history: History,
        forward: FastForward | None,
        position: Position,
        sequence: int,
    ) -> None:
        self._recording = recording
        self._history = history
        self._forward = forward or history.forward()
        self._position = position
        self._sequence = sequence
        self._last: StepRecord | None = None

    def fill(self, end: Position) -> Iterator[None]:
        """Append all messages before `end`. Yields after every few messages.

        The history is consistent only after the iterator has ended.

        Raises One of `DAMAGE`: do not use this history; append message by message to a new one.
        """
        num_taken = 0
        for chunk, place, last in _chunks(self._recording, self._position, end):
            while place < last:
                run_end = chunk.end_of_run(place, min(last, place + TURN_MESSAGES))
                num_in_run = self._take_run(chunk.frames.bodies(place, run_end))
                if not num_in_run:
                    self._take_one(chunk, place)
                place += num_in_run or 1
                num_taken += num_in_run or 1
                if num_taken >= TURN_MESSAGES:
                    num_taken = 0
                    yield
        self._forward.settle()
        if isinstance(self._last, PackedRecord):
            self._last = self._last.spelled_out(self._forward.rows())
        if self._last is not None:
            self._history.remember(self._last)  # the last step is the first one shown

    def _take_run(self, bodies: list[tuple[int, bytes]]) -> int:
        """Append packed steps up to the first that needs `History.append`. Returns how many."""
        run, sequence = [], self._sequence
        for lower, payload in bodies:
            sequence = whole_sequence(lower, sequence)
            run.append(PackedStep(sequence, decode_packed(payload), payload))
        num_taken = self._history.take_run(run, self._forward) if run else 0
        if num_taken:
            self._sequence, self._last, _ = run[num_taken - 1]
        return num_taken

    def _take_one(self, chunk: LoadedChunk, place: int) -> None:
        frame = chunk.frame(place)
        if frame is None:
            raise ValueError("a packed step that does not fit the one before it")
        self._sequence = whole_sequence(frame.sequence, self._sequence)
        message = wire.decode(frame.payload)
        if self._history.keeps_state or not has_no_request(message):
            self._forward.settle()
        self._history.append(self._sequence, message, frame.payload)
        if not self._history.is_state(self._forward.state):  # a new engine, or the clock went back
            self._forward = self._history.forward()
        self._forward.note(message)
        if isinstance(message, StepRecord):
            self._last = message


WINDOW_S = 60.0  # window of latencies
WINDOW_STEPS = 200  # steps of lanes and charts, and the most that a seek fills at once
MAX_WINDOW_STEPS = 20_000  # most steps to fill, so that a seek stays quick


def state_at(recording: Recording, position: Position) -> tuple[SessionState, int]:
    """The state after all messages before a position, and the number of the last message.

    For a position before the first keyframe, it is the state of the first keyframe.

    Raises RecordingError: no keyframe can be read.
    """
    try:
        forward, sequence = forwarded(recording, position)
        return forward.finish(), sequence
    except (msgspec.DecodeError, ValueError, LookupError, TypeError):
        # The file is damaged: apply the messages that can be read, one by one.
        snapshot, start = recording.keyframe_before(position)
        state, sequence = SessionState.from_snapshot(snapshot), snapshot.sequence
        for frame, after in recording.frames(start, sequence):
            if after > position:
                break
            state.apply(wire.decode(frame.payload))
            sequence = frame.sequence
        return state, sequence


def forwarded(recording: Recording, end: Position) -> tuple[FastForward, int]:
    """Return a `FastForward` that has applied all messages before a position.

    It has the same state as `state_at` returns, after `settle`.

    Raises:
        RecordingError: no keyframe can be read.
        msgspec.DecodeError, ValueError, LookupError, TypeError: damage, which `state_at` skips.
    """
    snapshot, start = recording.keyframe_before(end)
    forward = FastForward(SessionState.from_snapshot(snapshot))
    sequence = snapshot.sequence
    for chunk, place, last in _chunks(recording, start, end):
        while place < last:
            run_end = chunk.end_of_run(place, last)
            for lower, payload in chunk.frames.bodies(place, run_end):
                forward.advance(decode_packed(payload))
                sequence = whole_sequence(lower, sequence)
            if run_end < last:
                frame = chunk.frames[run_end]
                forward.take(wire.decode(frame.payload))
                sequence = whole_sequence(frame.sequence, sequence)
            place = run_end + 1
    return forward, sequence


def _chunks(
    recording: Recording, start: Position, end: Position
) -> Iterator[tuple[LoadedChunk, int, int]]:
    """Yield the chunks between two positions, each with the places of the messages to read."""
    for number in range(start.chunk, min(end.chunk + 1, recording.num_chunks)):
        chunk = recording.chunk(number)
        first = start.message if number == start.chunk else 0
        yield chunk, first, min(end.message, len(chunk)) if number == end.chunk else len(chunk)


def step_in(recording: Recording, step: int, ns: int) -> int | None:
    """The last step recorded by the time of `step` plus `ns`, which may be negative.

    None if that time is outside the file.
    """
    position = recording.find_step(step)
    frame = None if position is None else recording.frame_before(position)
    if frame is None:
        return None
    time_ns = frame.log_ns + ns
    if not recording.start_ns <= time_ns <= recording.end_ns:
        return None
    return recording.step_before(recording.find_time(time_ns + 1))


def window_start(recording: Recording, step: int, num_shown: int) -> tuple[Snapshot, Position]:
    """The keyframe to read from for all that a screen at `step` needs; the position after it."""
    start = recording.find_step(step - max(num_shown, WINDOW_STEPS)) or Position(0, 0)
    frame = recording.frame_before(recording.find_step(step) or Position(0, 0))
    if frame is not None:
        # Include the last step before the window, which tells whether the engine stood still
        # between the beginning of the window and its first step.
        begin = recording.find_time(frame.log_ns - round(WINDOW_S * 1e9))
        before = recording.step_before(begin)
        if before is not None:
            begin = recording.find_step(before - 1) or Position(0, 0)
        start = min(start, begin)
    latest = recording.find_step(step - MAX_WINDOW_STEPS)
    return recording.keyframe_before(start if latest is None else max(start, latest))


# Called after every few messages; returns whether to go on.
Turn: TypeAlias = Callable[[], bool]


def excerpt(
    recording: Recording, like: History, begin: Position, end: Position, turn: Turn
) -> History | None:
    """A new history of the messages between two positions; None if `turn` ended the reading.

    `like`: the history to take service levels and limits from.

    Raises:
        RecordingError: no keyframe can be read.
        msgspec.DecodeError: a message cannot be decoded.
    """
    try:
        forward, sequence = forwarded(recording, begin)
        history = _new(like)
        history.begin(forward.finish(), sequence)
        filled = Filler(recording, history, forward, begin, sequence).fill(end)
        return history if _done(filled, turn) else None
    except DAMAGE:
        history = _new(like)
        state, sequence = state_at(recording, begin)
        history.begin(state, sequence)
        return _one_by_one(recording, history, begin, sequence, end, turn)


def windows(
    recording: Recording, like: History, step: int, num_shown: int, end: Position, turn: Turn
) -> History | None:
    """A new history of all steps that the charts and latencies of a screen need at `step`.

    None if `turn` ended the reading (see `excerpt`), or if `like` has these steps already.
    """
    snapshot, begin = window_start(recording, step, num_shown)
    first_step = like.first_step
    if first_step is not None and first_step <= snapshot.step + 1:
        return None
    history = _new(like)
    history.reset(snapshot)
    sequence = snapshot.sequence
    try:
        filled = Filler(recording, history, None, begin, sequence).fill(end)
        return history if _done(filled, turn) else None
    except DAMAGE:
        history = _new(like)
        history.reset(snapshot)
        return _one_by_one(recording, history, begin, sequence, end, turn)


def _new(like: History) -> History:
    return History(like.slo, like.max_steps, like.max_bytes, like.known_since_ns)


def _done(filled: Iterator[None], turn: Turn) -> bool:
    return all(turn() for _ in filled)


def _one_by_one(
    recording: Recording,
    history: History,
    begin: Position,
    sequence: int,
    end: Position,
    turn: Turn,
) -> History | None:
    for number, (frame, after) in enumerate(recording.frames(begin, sequence)):
        if after > end:
            break
        history.append(frame.sequence, frame.payload)
        if number % TURN_MESSAGES == 0 and not turn():
            return None
    return history
