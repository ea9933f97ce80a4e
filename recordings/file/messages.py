"""`messages`: the one reader of a recording's messages, each once and in order."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot, Telemetry
from stepscope.recordings.file.reader import Position, Recording


class Told(NamedTuple):
    """A message of a recording."""

    message: Telemetry
    sequence: int
    position: Position
    after_gap: bool


def messages(
    recording: Recording, position: Position | None = None, sequence: int | None = None
) -> Iterator[Told]:
    """Yield all messages from a position on (None: all).

    Of the keyframes, which repeat the state, only those that tell something new: the first one if
    reading begins with it, and the next one after messages that are missing. Messages that cannot
    be decoded are missing; 'stepscope verify' reports them.

    Args:
        sequence: number of the last message before that position; None if unknown.
    """
    engine_id: str | None = None
    last, needs_keyframe = sequence, sequence is None
    for frame, after in recording.frames(position, sequence or 0):
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            continue
        number = frame.sequence
        if isinstance(message, Mark):  # by an observer: its number is not the engine's
            yield Told(message, number, after, after_gap=False)
            continue
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and info.engine_id != engine_id:
            if engine_id is not None:
                last, needs_keyframe = None, True
            engine_id = info.engine_id
        if isinstance(message, Snapshot):
            # It has the number of the last message that it knows of.
            after_gap = last is not None and number > last
            if not after_gap and not needs_keyframe:
                continue
            needs_keyframe = False
        else:
            if last is not None and number <= last:
                continue
            after_gap = last is not None and number > last + 1
            needs_keyframe = needs_keyframe or after_gap
        last = max(last or 0, number)
        yield Told(message, number, after, after_gap)
