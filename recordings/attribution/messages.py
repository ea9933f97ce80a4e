"""Iterates over the messages of a recording, each once, and notices missing ones."""

from collections.abc import Iterator

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Snapshot, Telemetry
from stepscope.recordings.file.reader import Position, Recording


def messages_in(
    recording: Recording, position: Position | None = None, sequence: int | None = None
) -> Iterator[tuple[Telemetry, bool]]:
    """Yield all messages but marks, each with whether messages before it are missing.

    Args:
        position: where to begin; None: at the beginning.
        sequence: number of the last message before that position; None if unknown.

    Raises:
        msgspec.DecodeError: a message cannot be read.
    """
    engine_id: str | None = None
    last = sequence
    for frame, _ in recording.frames(position, sequence or 0):
        if frame.topic == wire.TOPICS[wire.Mark]:
            continue
        message = wire.decode(frame.payload)
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and info.engine_id != engine_id:
            if engine_id is not None:
                last = None
            engine_id = info.engine_id
        expected = None if last is None else last + 1
        if isinstance(message, Snapshot):
            is_lost = last is not None and frame.sequence > last
        elif expected is not None and frame.sequence < expected:
            continue  # this message was read before
        else:
            is_lost = expected is not None and frame.sequence > expected
        last = frame.sequence
        yield message, is_lost
