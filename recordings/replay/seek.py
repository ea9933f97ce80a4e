"""Seeking in a recording: the state at a position, and where the steps for a screen begin."""

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.file.reader import Position, Recording, whole_sequence
from stepscope.recordings.history.ring.fast_forward import FastForward
from stepscope.recordings.history.ring.packed_record import decode_packed
from stepscope.recordings.state.session import SessionState

WINDOW_S = 60.0  # window of latencies
WINDOW_STEPS = 200  # steps of lanes and charts, and the most that a seek fills at once
MAX_WINDOW_STEPS = 20_000  # most steps to fill, so that a seek stays quick


def state_at(recording: Recording, position: Position) -> tuple[SessionState, int]:
    """The state after all messages before a position, and the number of the last message.

    For a position before the first keyframe, it is the state of the first keyframe.

    Raises:
        RecordingError: no keyframe can be read.
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
    for number in range(start.chunk, min(end.chunk + 1, recording.num_chunks)):
        chunk = recording.chunk(number)
        place = start.message if number == start.chunk else 0
        last = min(end.message, len(chunk)) if number == end.chunk else len(chunk)
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
    """The keyframe to read from for all that a screen at `step` needs, and the position after it.

    Args:
        num_shown: number of steps in the lanes and charts.
    """
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
