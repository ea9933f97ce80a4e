"""A subscriber, or `stepscope record`, in a process of its own that writes down all it gets.

    clients.py LOG observe ENDPOINT [SLOW_MS]
    clients.py LOG record ENDPOINT -o FILE ...

LOG gets a line `join ENGINE NUMBER` for each snapshot it begins from, `got NUMBER TOPIC CHECKSUM`
for each message, `replay FROM END OLDEST` for each answer of the replay ring; an observer's also
`session {...}` for each engine when it is over. SIGUSR1: it is slow no more. SIGTERM: an observer
ends, once nothing is wrong.

What a client has not got although the engine still had it when it was asked is a bug.
"""

import json
import signal
import sys
import time
import zlib
from typing import IO

import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.replies import Replayed
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from stepscope.recordings.live import subscriber
from stepscope.recordings.live.gap_recovery import GapRecovery
from stepscope.tui.cli.__main__ import main as stepscope

END_S = 10.0
QUEUE, SOCKET_BYTES = 50, 32 * 1024  # of a slow one
_KEYFRAME = wire.TOPICS[Snapshot]


def note_replays(log: IO[str]) -> None:
    """From now on, note each answer that a subscriber of this process goes by.

    It says of all messages before END what there was of them. So does the end of what is held of an
    engine that is gone: there is nothing any more.
    """
    replay, end = GapRecovery._replay, GapRecovery.end

    def noting(recovery: GapRecovery, client: ControlClient, sequence: int, limit: int) -> Replayed:
        replayed = replay(recovery, client, sequence, limit)
        frames, oldest = replayed.frames, replayed.oldest_sequence
        reach = max(oldest, frames[-1].sequence + 1 if frames else sequence + limit)
        log.write(f"replay {sequence} {reach} {oldest}\n")
        return replayed

    def noting_end(recovery: GapRecovery) -> None:
        if held := recovery._buffered:
            log.write(f"replay {recovery._next_sequence} {held.newest} {held.newest}\n")
        end(recovery)

    GapRecovery._replay = noting
    GapRecovery.end = noting_end


def note_frame(log: IO[str], topic: bytes, sequence: int, payload: bytes) -> None:
    if topic == _KEYFRAME:
        message = wire.decode(payload)
        assert isinstance(message, Snapshot)
        log.write(f"join {message.info.engine_id} {sequence}\n")
    else:
        log.write(f"got {sequence} {topic.decode()} {zlib.crc32(payload)}\n")


def note_session(log: IO[str], history: History, source: subscriber.Subscriber) -> None:
    if history.info is None:
        return
    first, last = history.first_step, history.last_step
    steps = [] if first is None or last is None else history.summaries(first, last)
    told = {
        "engine": history.info.engine_id,
        "gaps": [list(gap) for gap in history.gaps],
        "steps": [summary.step for summary in steps if summary is not None],
    }
    for of, names in (
        (history, ("num_lost", "last_sequence", "needs_snapshot")),
        (source, ("num_bad", "status", "error")),
    ):
        told |= {name: getattr(of, name) for name in names}
    log.write(f"session {json.dumps(told)}\n")


def observe(log: IO[str], endpoint: str, slow_ms: float) -> None:
    if slow_ms:
        subscriber.RECEIVE_QUEUE = QUEUE
        zmq.Context.instance().setsockopt(zmq.RCVBUF, SOCKET_BYTES)
    pauses_s = [slow_ms / 1e3]  # none after SIGUSR1
    ending: list[int] = []  # an Event set by a signal handler can deadlock its waiter
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: pauses_s.clear())

    def on_frame(topic: bytes, sequence: int, payload: bytes) -> None:
        note_frame(log, topic, sequence, payload)
        if topic != _KEYFRAME:
            time.sleep(sum(pauses_s))

    source = subscriber.Subscriber(endpoint, History(max_steps=10_000_000))
    source.tap.attach(on_frame)
    source.start()
    before: History | None = None
    while not ending:
        time.sleep(0.02)
        previous = source.history.previous
        if previous is not None and previous is not before:
            before = previous
            note_session(log, previous, source)
    # A loss is corrected a moment later: there is a pause between two queries.
    deadline_s = time.monotonic() + END_S
    while time.monotonic() < deadline_s and (
        source.status != "live" or source.history.needs_snapshot
    ):
        time.sleep(0.02)
    source.stop()
    note_session(log, source.history, source)


def record(log: IO[str]) -> None:
    on_frame = RecordingWriter.on_frame

    def noting(writer: RecordingWriter, topic: bytes, sequence: int, payload: bytes) -> None:
        note_frame(log, topic, sequence, payload)
        on_frame(writer, topic, sequence, payload)

    RecordingWriter.on_frame = noting
    stepscope()


if __name__ == "__main__":
    with open(sys.argv.pop(1), "w", buffering=1) as told:
        note_replays(told)
        if sys.argv[1] == "record":
            record(told)
        else:
            observe(told, sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
