"""`moments`: yields the messages of a range of a recording, and the session's state after each."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from stepscope.engine.protocol.wire import Snapshot, StepRecord, Telemetry
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.step_range import StepRange, bounds
from stepscope.recordings.state.clocks import leave_out
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState

Progress = Callable[[float], None]


class Moment(NamedTuple):
    """A message of a recording, and the state of the session right after it.

    `outcome`: for a step, the tokens it gave and how long each was waited for, without the
    operator's pauses and waits that began before `since_ns`; None for other messages.
    """

    message: Telemetry
    sequence: int
    state: SessionState
    outcome: Outcome | None
    offset_ns: int  # wall-clock time minus engine time
    since_ns: int  # engine time since when all pauses by the operator are known
    after_gap: bool  # whether messages were lost right before this message


def moments(recording: Recording, steps: StepRange, progress: Progress) -> Iterator[Moment]:
    """Yield all messages from the first step of the range to its last, without keyframes.

    Keyframes are snapshots of the state.

    Raises:
        NotInRecording: the range contains no step.
        RecordingError: the recording contains no step.
    """
    first, last = bounds(recording, steps)
    before = recording.find_step(first - 1) if first > 0 else None
    snapshot, position = recording.keyframe_before(before or Position(0, 0))
    state = SessionState.from_snapshot(snapshot)
    offset_ns = recording.info.wall_at(0)
    since_ns = recording.known_since_ns
    begun = snapshot.step >= first - 1
    last_step = snapshot.step
    for message, sequence, place, after_gap in messages(recording, position, snapshot.sequence):
        if isinstance(message, Snapshot):
            state.apply(message)
            continue
        if isinstance(message, StepRecord):
            if message.step > last:
                return
            begun = begun or message.step >= first
            progress((message.step - first + 1) / (last - first + 1))
            if message.step <= last_step:
                continue  # the publisher repeats steps under new numbers
            last_step = message.step
        outcome = state.apply(message)
        if begun:
            if outcome is not None and isinstance(message, StepRecord):
                leave_out(outcome, state, message.tokens_ns, since_ns)
            yield Moment(message, sequence, state, outcome, offset_ns, since_ns, after_gap)
        elif place == before:
            begun = True
