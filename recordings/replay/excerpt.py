"""Builds a history from a stretch of a recording, for a replay to show after a seek."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.filling import DAMAGE, TURN_MESSAGES, Filler
from stepscope.recordings.replay.seek import forwarded, state_at, window_start

_SOON_STEPS = 1_500  # for at most so many steps on the screen, these are filled before the windows

# Called after every few messages; returns whether to go on.
Turn: TypeAlias = Callable[[], bool]


def excerpt(
    recording: Recording, like: History, begin: Position, end: Position, turn: Turn
) -> History | None:
    """A new history of the messages between two positions; None if `turn` ended the reading.

    Args:
        like: the history to take service levels and limits from.

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


def screenful(
    recording: Recording, like: History, step: int, num_shown: int, end: Position, turn: Turn
) -> History | None:
    """A new history of only the steps on the screen before `step`, which is built quickly.

    None if it would not be much quicker than `windows`, if `like` has these steps already, or if
    the file has no more.
    """
    first_step = like.first_step
    if first_step is None or num_shown > _SOON_STEPS or first_step <= step - num_shown + 1:
        return None
    begin = recording.find_step(step - num_shown) or Position(0, 0)
    history = excerpt(recording, like, begin, end, turn)
    if history is None or history.first_step is None or history.first_step >= first_step:
        return None
    return history


def windows(
    recording: Recording,
    like: History,
    step: int,
    num_shown: int,
    end: Position,
    turn: Turn,
) -> History | None:
    """A new history of all steps that the charts and latencies of a screen need at `step`.

    None if `turn` ended the reading (see `excerpt`), or if `like` has these steps already.

    Args:
        num_shown: number of steps that the lanes and charts show.
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
    """Append message by message, without those that cannot be read."""
    for number, (frame, after) in enumerate(recording.frames(begin, sequence)):
        if after > end:
            break
        history.append(frame.sequence, frame.payload)
        if number % TURN_MESSAGES == 0 and not turn():
            return None
    return history
