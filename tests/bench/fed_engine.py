"""Stands in for an engine at any rate of steps: made-up messages behind real sockets. Not a test.

    fed_engine.py ENDPOINT --requests 64 --rate 50 --burst 1000 [--seconds 10]

The first snapshot request starts the session; `burst` steps are sent at once, the others in
their time. Gaps are recovered from the replay ring as those of any engine are. With `--seconds` it
makes up all messages before it starts, stops after them, prints how many messages and steps it has
sent, how many were dropped on the way, and in how many seconds, and ends with its standard input.
"""

import sys
import threading
import time
from collections.abc import Iterator

import zmq
from common import parser
from synthetic_session import Frame, SyntheticSession, cut

from stepscope.engine.protocol import commands, replies, wire
from stepscope.engine.protocol.commands import GetInfo, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, Snapshot
from stepscope.engine.telemetry.publisher import SUBSCRIBER_QUEUE, Publisher
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.state.session import SessionState

PERIOD_STEPS = 4_000
BURST_RATE = 2_500.0  # steps a second, so that nothing is missed


class FedPublisher(Publisher):
    """A publisher of messages that are encoded already."""

    def send(self, frame: Frame) -> None:
        assert frame.sequence == self.next_sequence
        self.sender.add(frame.topic, bytearray(frame.payload))


def serve(
    endpoint: Endpoint, info: EngineInfo, publisher: Publisher, started: threading.Event
) -> None:
    """Answer commands for ever."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint.control)
    start = SessionState(info=info).snapshot(0)
    while True:
        client, number, payload = socket.recv_multipart()
        command = commands.decode_command(payload)
        reply: AnyReply | Snapshot | None = info
        if isinstance(command, GetSnapshot):
            reply = start
        elif isinstance(command, ReplayFrom):
            reply = publisher.replay(command.sequence, command.limit)
        elif not isinstance(command, GetInfo):
            reply = Error(code="not_here", message="nothing can be changed: this is a bench")
        socket.send_multipart((client, number, replies.encode(reply)))
        if isinstance(command, GetSnapshot):
            started.set()


def main() -> None:
    options = parser(__doc__, requests=64, rate=50.0, burst=1_000, seconds=float)
    options.add_argument("endpoint")
    given = options.parse_args()
    endpoint = Endpoint.parse(given.endpoint)
    session = SyntheticSession(given.requests, given.rate, PERIOD_STEPS)
    publisher = FedPublisher(endpoint.telemetry, ring_size=4 * SUBSCRIBER_QUEUE)
    publisher.send(Frame(wire.TOPICS[EngineInfo], 0, wire.encode(session.info)))
    started = threading.Event()
    arguments = (endpoint, session.info, publisher, started)
    threading.Thread(target=serve, args=arguments, daemon=True).start()
    frames = session.frames()
    if given.seconds is not None:
        frames = iter([*cut(frames, int(given.rate * given.seconds))])
        print("ready", flush=True)
    started.wait()
    start_s = time.monotonic()
    num_steps = send(frames, publisher, given.rate, given.burst)
    took_s = time.monotonic() - start_s
    state = EngineStatus(time_ns=0, state="stopped", step=-1, num_running=0, num_waiting=0)
    for _ in range(3):  # seen by a subscriber that missed the first
        publisher.publish(state)
        time.sleep(0.5)
    num_dropped = publisher.sender.num_dropped
    print(publisher.next_sequence, num_steps, num_dropped, f"{took_s:.3f}", flush=True)
    sys.stdin.read()


def send(frames: Iterator[Frame], publisher: FedPublisher, rate: float, burst: int) -> int:
    """Send each step when it is due, up to what the machine can; return their number."""
    due_s = time.monotonic()
    num_steps = 0
    for frame in frames:
        publisher.send(frame)
        if frame.topic != b"step":
            continue
        num_steps += 1
        due_s += 1 / (BURST_RATE if num_steps <= burst else rate)
        if num_steps == burst:
            due_s = time.monotonic()
        if (ahead_s := due_s - time.monotonic()) > 0.0005:
            time.sleep(ahead_s)
    return num_steps


if __name__ == "__main__":
    main()
