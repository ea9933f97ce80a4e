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
    progress: Callable[[float], None],
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
    """Yield a snapshot, then the messages of a follower, each with its sequence number and payload.

    The snapshot is the state before the first message. The sequence numbers of steps are known.
    Other messages get numbers between those.
    """
    state = follower.state
    early: list[tuple[Telemetry, bytes]] = []  # before the first step
    last: int | None = None
    num_forgotten = 0  # before the first step
    while num_messages > 0 and (payloads := follower.read_payloads(min(num_messages, _TURN))):
        num_messages -= len(payloads)
        if last is None:
            num_forgotten = follower.num_forgotten
        for payload in payloads:
            message = wire.decode(payload)
            if last is not None:
                last += 1
            if isinstance(message, StepRecord):
                if last is None:
                    first = max(sequences.get(message.step, 0) - len(early), 0)
                    # Messages missing before the first step came after the state.
                    missing = num_lost.get(message.step, 0) + num_forgotten
                    true_after = first - 1 - missing
                    # Before the very first message there was no state.
                    snapshot = state.snapshot(true_after) if true_after >= 0 else None
                    if snapshot is not None:
                        yield snapshot, snapshot.sequence, wire.encode(snapshot)
                    for last, each in enumerate(early, start=first):
                        yield each[0], last, each[1]
                    last = first + len(early)
                last = max(last, sequences.get(message.step, last))
            elif last is None:
                early.append((message, payload))
                continue
            elif isinstance(message, Snapshot):
                last = max(last - 1, message.sequence)  # snapshots have no number of their own
            yield message, last, payload
