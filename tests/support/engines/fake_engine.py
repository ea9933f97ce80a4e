"""An engine whose messages a test chooses, drops and breaks, and a subscriber that follows it."""

import threading
import time
from functools import partial
from pathlib import Path

import zmq

from stepscope.engine.protocol import commands, replies, wire
from stepscope.engine.protocol.commands import GetInfo, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import AnyReply, Error, Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import EngineInfo, Telemetry
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.rate_limit import RateLimiter
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.session import SessionState
from tests.support.sessions import history_steps
from tests.support.sessions.history_steps import step
from tests.support.waiting import wait_for

info = partial(history_steps.info, name="fake")


class FakeEngine:
    """ROUTER and PUB sockets whose messages the test chooses, drops and breaks.

    Args:
        info: its description of itself.
        first_sequence: the sequence number of its first message.
    """

    def __init__(self, folder: Path, info: EngineInfo, first_sequence: int = 0) -> None:
        self.endpoint = Endpoint.parse(f"{folder}/fake")
        self.info = info
        self.state = SessionState(info=info)
        self.next_sequence = first_sequence
        self.kept: dict[int, tuple[bytes, bytes]] = {}
        self.asked: list[range] = []  # for replay, in order
        self.num_silenced = 0  # commands that came while it was silent
        self.limiter: RateLimiter | None = None
        self.num_limited = 0  # commands that it refused
        self.replays = threading.Event()  # replies to replay queries wait until it is set
        self.replays.set()
        self.refuses_replay = False
        self.is_silent = False
        self.num_unanswered = 0  # of the next commands: their replies are lost on the way
        self.largest_replay = 10_000  # replies with more messages do not arrive
        self.successor: EngineInfo | None = None  # called when a snapshot is requested
        self._lock = threading.Lock()
        self._pub = zmq.Context.instance().socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.bind(self.endpoint.telemetry)
        self._router = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(self.endpoint.control)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def publish(self, message: Telemetry, *, lost: bool = False, forgotten: bool = False) -> None:
        """Send a message; `lost` on the way, `forgotten` by the replay ring too."""
        with self._lock:
            sequence = self.next_sequence
            self.next_sequence += 1
            self.state.apply(message)
            topic, payload = wire.TOPICS[type(message)], wire.encode(message)
            if not forgotten:
                self.kept[sequence] = (topic, payload)
        if not lost:
            self.send_raw(topic, wire.sequence_frame(sequence), payload)

    def send_raw(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._closing.set()
        self.replays.set()
        self._thread.join()
        self._pub.close()
        self._router.close()
        for address in (self.endpoint.telemetry, self.endpoint.control):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._router.poll(10):
                identity, command_id, payload = self._router.recv_multipart()
                reply = self._reply(identity, payload)
                if reply is not None:
                    self._router.send_multipart([identity, command_id, replies.encode(reply)])

    def _reply(self, identity: bytes, payload: bytes) -> AnyReply | None:
        command = commands.decode_command(payload)
        if self.limiter is not None:
            if not self.limiter.admit(identity, len(payload)):
                self.num_limited += 1
                return Error(code="rate_limited", message="too many")
            self.limiter.charge(identity, command)
        if isinstance(command, ReplayFrom) and command.limit > self.largest_replay:
            return None
        if self.num_unanswered:
            self.num_unanswered -= 1
            return None
        self.num_silenced += self.is_silent
        return None if self.is_silent else self._answer(command)

    def _answer(self, command: commands.AnyCommand) -> AnyReply:
        if isinstance(command, ReplayFrom) and not self.refuses_replay:
            self.asked.append(range(command.sequence, command.sequence + command.limit))
            self.replays.wait()
        with self._lock:
            if isinstance(command, GetInfo):
                return self.info
            if isinstance(command, GetSnapshot):
                if self.successor is not None:
                    self.info, self.successor = self.successor, None
                    self.state, self.next_sequence = SessionState(info=self.info), 1
                return self.state.snapshot(self.next_sequence - 1)
            if isinstance(command, ReplayFrom) and not self.refuses_replay:
                end = min(command.sequence + command.limit, self.next_sequence)
                frames = [
                    ReplayedFrame(self.kept[number][0], number, self.kept[number][1])
                    for number in range(command.sequence, end)
                    if number in self.kept
                ]
                return Replayed(frames=frames, oldest_sequence=0, next_sequence=self.next_sequence)
            return Error(code="no", message="not here")


class Session:
    """A fake engine and a subscriber that has joined it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = FakeEngine(folder, info())
        self.engine.publish(info())
        self.engine.publish(step(0))
        self.subscriber = Subscriber(self.engine.endpoint, stale_s=0.6, retry_s=0.05)
        self.subscriber.start()
        self.history = self.subscriber.history
        self.next_step = 1
        wait_for(lambda: self.subscriber.status == "live", "joined")
        # A new subscription reaches the publisher a moment after the snapshot was answered.
        while not self.history.num_steps:
            self.run(1)
            time.sleep(0.01)

    def run(self, num_steps: int, **how: bool) -> None:
        for _ in range(num_steps):
            self.engine.publish(step(self.next_step), **how)
            self.next_step += 1

    def run_with_gaps(self, num_steps: int) -> list[int]:
        """Publish steps, losing every second on the way; return the numbers of the others."""
        arrived = []
        for _ in range(num_steps // 2):
            self.run(1, lost=True)
            arrived.append(self.engine.next_sequence)
            self.run(1)
        return arrived

    def has_caught_up(self) -> bool:
        return self.history.last_sequence == self.engine.next_sequence - 1

    def steps(self) -> list[int]:
        first, last = self.history.first_step, self.history.last_step
        if first is None or last is None:
            return []
        return [s.step for s in self.history.summaries(first, last) if s is not None]

    def restart(self, engine_id: str, first_sequence: int = 0) -> None:
        self.engine.close()
        self.engine = FakeEngine(self.folder, info(engine_id), first_sequence)
        self.next_step = 0
