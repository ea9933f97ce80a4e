"""A simulated engine in a process of its own, busy until it is told to rest.

    engine.py ENDPOINT TRUTH --seed 1 --ring 1000

TRUTH gets a line for every message before it is sent: number, topic, step (or -1), checksum of the
payload. SIGUSR1 ends the work: from then on there are only signs of life. SIGTERM ends the engine.
"""

import argparse
import faulthandler
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import IO

import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import VOCAB_SIZE, SimulatedRunner
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.telemetry import publisher as telemetry
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_draft import StepDraft
from tests.support.engines.live_engine import running_engine

NUM_RUNNING = 8
NUM_BLOCKS = 512
# So little that a subscriber that does not read is noticed within the length of a test.
QUEUE = 100
SOCKET_BYTES = 32 * 1024


class PacedRunner(SimulatedRunner):
    """A simulated runner in real time, with steps of a millisecond."""

    def __init__(self, seed: int) -> None:
        super().__init__(CostModel(), seed)

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        launch_ns = time.monotonic_ns()
        token_ids = super().execute(step).token_ids
        time.sleep(0.001)
        return StepResult(token_ids, launch_ns=launch_ns, tokens_ns=time.monotonic_ns())


class TruthfulPublisher(Publisher):
    """A publisher that notes each message before sending it."""

    def __init__(self, address: str, ring_size: int, truth: IO[str]) -> None:
        super().__init__(address, ring_size)
        self._truth = truth

    def publish(self, message: Telemetry) -> None:
        step = message.step if isinstance(message, StepDraft) else -1
        topic = message.topic.decode()
        checksum = zlib.crc32(wire.encode(message))
        self._truth.write(f"{self.next_sequence} {topic} {step} {checksum}\n")
        super().publish(message)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("truth")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ring", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR2)  # reports where it is
    telemetry.SUBSCRIBER_QUEUE = QUEUE
    zmq.Context.instance().setsockopt(zmq.SNDBUF, SOCKET_BYTES)
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=NUM_RUNNING, max_model_len=1024)
    resting, ended = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: resting.set())
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    with (
        open(args.truth, "w", buffering=1) as truth,
        running_engine(
            args.endpoint,
            limits=limits,
            num_blocks=NUM_BLOCKS,
            runner=PacedRunner(args.seed),
            open_publisher=lambda address: TruthfulPublisher(address, args.ring, truth),
            seed=args.seed,
        ) as engine,
    ):
        threading.Thread(target=work, args=(engine.core, resting, args.seed), daemon=True).start()
        while not ended.wait(0.1):
            assert engine.thread.is_alive()


def work(core: EngineCore, resting: threading.Event, seed: int) -> None:
    """Keep a few more requests in the engine than it can run; some of them share a prefix."""
    rng = random.Random(seed)
    number = 0
    while not resting.wait(0.005):
        while len(core.scheduler.requests) + core.inbox.qsize() < NUM_RUNNING + 4:
            prompt = [0] * 64 + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 200))]
            sampling = SamplingParams(max_tokens=rng.randrange(1, 120), ignore_eos=True)
            submit = Submit(client_id=f"c-{number}", prompt_token_ids=prompt, sampling=sampling)
            core.inbox.put(Call(submit, SilentClient(), prompt))
            number += 1


if __name__ == "__main__":
    main()
