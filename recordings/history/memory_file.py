"""Writes a history to a file, to save the steps from before a recording was started."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.errors import TooLittleData
from stepscope.recordings.file.service_levels import as_metadata, levels_of
from stepscope.recordings.file.writing.engine_log import EngineLog
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.history.history import History
from stepscope.recordings.history.timeline import Follower

_TURN = 100  # messages between two calls of `progress`


def write_memory(
    history: History,
    path: Path,
    progress: Callable[[float], None] = lambda share: None,
    *,
    first: int | None = None,
    metadata: Mapping[str, str] | None = None,
    change: Callable[[Telemetry], Telemetry] | None = None,
) -> int:
    """Write the steps in memory and their marks to a file, up to the newest step at the call.

    Args:
        progress: called with the share (0 to 1) that is done. If it raises, the file is deleted.
        metadata: metadata for the file, besides the service levels.
        change: applied to each message before it is written.

    Returns the number of steps in the file.

    Raises:
        RecordingError: the file cannot be created. TooLittleData: memory holds no step.
        OSError: the file exists, or the disk is full.
    """
    follower = history.follow(first)
    num_messages = follower.num_ahead
    if not history.num_steps:
        raise TooLittleData("there is no step in memory")
    file = RecordingFile(path, is_new=True)
    try:
        log = EngineLog(file, as_metadata(levels_of(history.slo)) | dict(metadata or {}))
        sequence = 0
        for number, (message, sequence, payload) in enumerate(_told(follower, num_messages)):
            if number % _TURN == 0:
                progress(number / num_messages)
            if change is not None:
                message = change(message)
                payload = wire.encode(message)
            log.append(message, sequence, payload)
        for mark in history.marks:
            if log.first_step is not None and mark.step >= log.first_step:
                log.append(mark, sequence, wire.encode(mark))
        file.close()
    except BaseException:
        file.abandon()
        file.part_path.unlink(missing_ok=True)
        raise
    return log.num_steps


def _told(follower: Follower, num_messages: int) -> Iterator[tuple[Telemetry, int, bytes]]:
    """Yield the first known state and all messages after it, each with its number and payload."""
    state, has_begun = follower.state.copy(), False
    last = follower.sequence
    while num_messages > 0 and (told := list(follower.read(min(num_messages, _TURN)))):
        num_messages -= len(told)
        for message, _, sequence, payload in told:
            if not has_begun and (snapshot := state.snapshot(max(last, 0))) is not None:
                yield snapshot, snapshot.sequence, wire.encode(snapshot)
                has_begun = True
            if has_begun:
                yield message, sequence, payload
            else:  # the engine is not known yet
                state.apply(message)
                last = sequence
