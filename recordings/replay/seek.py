"""Seeking in a recording: the state at a position, and where the steps for a screen begin.

Builds a history from a stretch of a recording, for a replay to show after a seek.
"""

from collections.abc import Callable
from typing import TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.session import SessionState

TURN_MESSAGES = 64  # messages between two calls of `turn`

WINDOW_S = 60.0  # window of latencies
WINDOW_STEPS = 128  # steps of lanes and charts, and the most that a seek fills at once
MAX_WINDOW_STEPS = 20_000  # most steps to fill, so that a seek stays quick


def state_at(recording: Recording, position: Position) -> tuple[SessionState, int]:
    """The state after all messages before a position, and the number of the last message.

    For a position before the first keyframe, it is the state of the first keyframe.

    Raises RecordingError: no keyframe can be read.
    """
    snapshot, start = recording.keyframe_before(position)
    state, sequence = SessionState.from_snapshot(snapshot), snapshot.sequence
    for frame, after in recording.frames(start, sequence):
        if after > position:
            break
        state.apply(wire.decode(frame.payload))
        sequence = frame.sequence
    return state, sequence


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
    state, sequence = state_at(recording, begin)
    history = _new(like)
    history.begin(state, sequence)
    return _filled(recording, history, begin, sequence, end, turn)


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
    return _filled(recording, history, begin, snapshot.sequence, end, turn)


def _new(like: History) -> History:
    return History(like.slo, like.max_steps, like.max_bytes, like.known_since_ns)


def _filled(
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
