"""A subscriber in a process of its own that writes down all it gets.

    observer.py ENDPOINT LOG [--slow-ms 3]

LOG gets a line `join ENGINE NUMBER` for each snapshot it begins from, `got NUMBER TOPIC CHECKSUM`
for each message, `replay FROM END OLDEST` for each answer of the replay ring, and `session {...}`
for each engine when it is over. SIGUSR1: it is slow no more. SIGTERM: it ends, once nothing is
wrong.
"""

import argparse
import faulthandler
import json
import signal
import time
import zlib
from typing import IO, Any

import replies
import zmq

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.history.history import History
from stepscope.recordings.live import subscriber

END_S = 10.0
QUEUE = 50
SOCKET_BYTES = 32 * 1024
_KEYFRAME = wire.TOPICS[Snapshot]


class Notes:
    """The lines of the log."""

    def __init__(self, log: IO[str], slow_s: float) -> None:
        self._log = log
        self.slow_s = slow_s

    def on_frame(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if topic == _KEYFRAME:
            message = wire.decode(payload)
            assert isinstance(message, Snapshot)
            self._log.write(f"join {message.info.engine_id} {sequence}\n")
            return
        self._log.write(f"got {sequence} {topic.decode()} {zlib.crc32(payload)}\n")
        if self.slow_s:
            time.sleep(self.slow_s)

    def session(self, history: History, source: subscriber.Subscriber) -> None:
        info = history.info
        if info is None:
            return
        first, last = history.first_step, history.last_step
        steps = [] if first is None or last is None else history.summaries(first, last)
        told: dict[str, Any] = {
            "engine": info.engine_id,
            "num_lost": history.num_lost,
            "gaps": [list(gap) for gap in history.gaps],
            "steps": [summary.step for summary in steps if summary is not None],
            "last_sequence": history.last_sequence,
            "needs_snapshot": history.needs_snapshot,
            "num_recovered": source.num_recovered,
            "num_bad": source.num_bad,
            "status": source.status,
            "error": source.error,
        }
        self._log.write(f"session {json.dumps(told)}\n")


def is_well(source: subscriber.Subscriber) -> bool:
    """A loss is corrected a moment later: there is a pause between two queries."""
    return source.status == "live" and not source.history.needs_snapshot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("log")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    args = parser.parse_args()
    if args.slow_ms:
        subscriber.RECEIVE_QUEUE = QUEUE
        zmq.Context.instance().setsockopt(zmq.RCVBUF, SOCKET_BYTES)
    faulthandler.register(signal.SIGUSR2)  # reports where it is
    ending: list[int] = []  # an Event set by a signal handler can deadlock its waiter
    with open(args.log, "w", buffering=1) as log:
        replies.note_replays(log)
        notes = Notes(log, args.slow_ms / 1e3)
        source = subscriber.Subscriber(args.endpoint, History(max_steps=10_000_000))
        source.tap.attach(notes.on_frame)
        signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(notes, "slow_s", 0.0))
        source.start()
        before: History | None = None
        while not ending:
            time.sleep(0.02)
            previous = source.history.previous
            if previous is not None and previous is not before:
                before = previous
                notes.session(previous, source)
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s and not is_well(source):
            time.sleep(0.02)
        source.stop()
        notes.session(source.history, source)


if __name__ == "__main__":
    main()
