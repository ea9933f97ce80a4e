"""Writes a history to a file, to save the steps from before a recording was started."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Mark, Snapshot, StepRecord, Telemetry
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.service_levels import as_metadata, levels_of
from stepscope.recordings.file.writing.engine_log import EngineLog
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.history.follower import Follower
from stepscope.recordings.history.history import History

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
        RecordingError: memory holds no step, or the file cannot be created.
        OSError: the file exists, or the disk is full.
    """
    follower = history.follow(first)
    num_messages = follower.num_ahead
    sequences, num_lost = follower.sequences(), follower.num_lost()
    if not sequences:
        raise RecordingError("there is no step in memory")
    file = RecordingFile(path, is_new=True)
    try:
        log = EngineLog(file, as_metadata(levels_of(history.slo)) | dict(metadata or {}))
        sequence = 0
        frames = _frames(follower, num_messages, sequences, num_lost)
        for number, (message, sequence, payload) in enumerate(frames):
            if number % _TURN == 0:
                progress(number / num_messages)
            if change is not None:
                message = change(message)
                payload = wire.encode(message)
            log.append(message, (message.topic, sequence, payload))
        for mark in history.marks:
            if log.first_step is not None and mark.step >= log.first_step:
                log.append(mark, (Mark.topic, sequence, wire.encode(mark)))
        file.close()
    except BaseException:
        file.abandon()
        file.part_path.unlink(missing_ok=True)
        raise
    return log.num_steps


def _frames(
    follower: Follower, num_messages: int, sequences: Mapping[int, int], num_lost: Mapping[int, int]
) -> Iterator[tuple[Telemetry, int, bytes]]:
    """Yield the state before the first step, and all messages from that step on.

    Each comes with its sequence number and payload. The numbers of steps are known. Other messages
    get numbers between those.
    """
    state, last = follower.state.copy(), None
    while num_messages > 0 and (payloads := follower.read_payloads(min(num_messages, _TURN))):
        num_messages -= len(payloads)
        for payload in payloads:
            message = wire.decode(payload)
            if isinstance(message, StepRecord):
                if last is None:
                    last = sequences.get(message.step, 0) - 1
                    # Messages missing before the first step came after the state.
                    missing = num_lost.get(message.step, 0) + follower.num_forgotten
                    snapshot = state.snapshot(max(last - missing, 0))
                    if snapshot is not None:
                        yield snapshot, snapshot.sequence, wire.encode(snapshot)
                last = max(last + 1, sequences.get(message.step, 0))
            elif last is None:
                state.apply(message)
                continue
            elif isinstance(message, Snapshot):
                last = max(last, message.sequence)  # snapshots have no number of their own
            else:
                last += 1
            yield message, last, payload
