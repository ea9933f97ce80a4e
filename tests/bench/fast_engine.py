"""Publishes a prepared session at a given rate, up to what the machine can send.

    fast_engine.py ENDPOINT --rate 5000 --seconds 20 --requests 64

Not a benchmark itself: `bench_wire.py` starts it. It answers what a subscriber asks. A line on
standard input starts it; it prints how many messages and steps it has sent, and how many of them
some subscriber missed, and ends with its standard input.
"""

import argparse
import sys
import threading
import time

import zmq

from stepscope.engine.protocol import commands, replies
from stepscope.engine.protocol.commands import GetInfo, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, StepRecord, Telemetry
from stepscope.engine.simulation.simulated import SimulatedWorkload, simulate
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.state.session import SessionState

RING_STEPS = 20_000  # as by default
TICK_S = 0.002


def session(num_steps: int, num_requests: int) -> list[Telemetry]:
    """Messages of an engine whose seats are nearly always full, with hardly any queue."""
    workload = SimulatedWorkload(
        rate=0.75 * num_requests, chat_tokens=200, document_share=0.02, output_tokens=120
    )
    knobs = Knobs(max_num_batched_tokens=2048, max_num_seqs=num_requests)
    cost = CostModel(floor_ms=10.0, token_us=1.0, context_ns=0.0)
    told = simulate(
        5, num_steps, num_blocks=64 * num_requests, knobs=knobs, workload=workload, cost=cost
    )
    return [message for _, message in told]


class FastEngine:
    """A publisher of prepared messages, and the control socket of it."""

    def __init__(self, endpoint: Endpoint, messages: list[Telemetry]) -> None:
        info = messages[0]
        assert isinstance(info, EngineInfo)
        self.info = info
        self.messages = messages
        self.publisher = Publisher(endpoint.telemetry, RING_STEPS)
        self._state = SessionState()
        self._num_applied = 0
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.bind(endpoint.control)
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self, end: int) -> None:
        with self._lock:
            while self.publisher.next_sequence < end:
                self.publisher.publish(self.messages[self.publisher.next_sequence])

    def _serve(self) -> None:
        while True:
            identity, number, payload = self._router.recv_multipart()
            reply = self._answer(commands.decode_command(payload))
            self._router.send_multipart([identity, number, replies.encode(reply)])

    def _answer(self, command: commands.AnyCommand) -> AnyReply:
        if isinstance(command, GetInfo):
            return self.info
        if isinstance(command, ReplayFrom):
            return self.publisher.replay(command.sequence, command.limit)
        if isinstance(command, GetSnapshot):
            with self._lock:
                end = self.publisher.next_sequence
            for message in self.messages[self._num_applied : end]:
                self._state.apply(message)
            self._num_applied = end
            snapshot = self._state.snapshot(end - 1)
            assert snapshot is not None
            return snapshot
        return Error(code="unsupported", message="not here")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--requests", type=int, required=True)
    args = parser.parse_args()
    messages = session(int(args.rate * args.seconds), args.requests)
    last = messages[-1]
    end = EngineStatus(time_ns=last.tokens_ns if isinstance(last, StepRecord) else 0,
                       state="stopped", step=-1, num_running=0, num_waiting=0)  # fmt: skip
    engine = FastEngine(Endpoint.parse(args.endpoint), messages)
    engine.publish(1)
    print("ready", flush=True)
    sys.stdin.readline()
    start_s = time.perf_counter()
    while engine.publisher.next_sequence < len(messages):
        due = 1 + int((time.perf_counter() - start_s) * args.rate)
        engine.publish(min(due, len(messages)))
        time.sleep(TICK_S)
    took_s = time.perf_counter() - start_s
    num_steps = sum(isinstance(message, StepRecord) for message in messages)
    for _ in range(3):  # seen by a subscriber that missed the first
        engine.publisher.publish(end)
        time.sleep(0.5)
    publisher = engine.publisher
    print(
        f"{publisher.next_sequence} {num_steps} {publisher.sender.num_dropped} {took_s:.3f}",
        flush=True,
    )
    sys.stdin.read()


if __name__ == "__main__":
    main()
