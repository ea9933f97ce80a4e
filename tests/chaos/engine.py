"""A simulated engine in a process of its own, busy until it is told to rest.

    engine.py ENDPOINT TRUTH SEED RING

TRUTH gets a line for every message before it is sent: number, topic, step (or -1), checksum of the
payload. RING is how many messages it keeps. SIGUSR1 ends the work: from then on there are only
signs of life. SIGTERM ends the engine.
"""

import random
import signal
import sys
import threading
import zlib
from pathlib import Path
from typing import IO

import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.simulation.simulated import VOCAB_SIZE
from stepscope.engine.telemetry import publisher as telemetry
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_draft import StepDraft
from tests.support.engines.cost_model import CostModel
from tests.support.engines.live_engine import PacedRunner, running_engine

LIMITS = Limits(max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=1024)
COST = CostModel(floor_ms=1.0, token_us=0.0, context_ns=0.0)
# So little that a subscriber that does not read is noticed within the length of a test.
QUEUE, SOCKET_BYTES = 100, 32 * 1024


class TruthfulPublisher(Publisher):
    """A publisher that notes each message before sending it."""

    def __init__(self, address: str, ring_size: int, truth: IO[str]) -> None:
        super().__init__(address, ring_size)
        self._truth = truth

    def publish(self, message: Telemetry) -> None:
        step = message.step if isinstance(message, StepDraft) else -1
        topic, checksum = message.topic.decode(), zlib.crc32(wire.encode(message))
        self._truth.write(f"{self.next_sequence} {topic} {step} {checksum}\n")
        super().publish(message)


def main(endpoint: str, path: str, seed: int, ring: int) -> None:
    telemetry.SUBSCRIBER_QUEUE = QUEUE
    zmq.Context.instance().setsockopt(zmq.SNDBUF, SOCKET_BYTES)
    resting, ended = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: resting.set())
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    with (
        open(path, "w", buffering=1) as truth,
        running_engine(
            endpoint,
            limits=LIMITS,
            num_blocks=512,
            runner=PacedRunner(COST, seed),
            open_publisher=lambda address: TruthfulPublisher(address, ring, truth),
            seed=seed,
        ) as engine,
    ):
        threading.Thread(target=work, args=(engine.core, resting, seed), daemon=True).start()
        while not ended.wait(0.1):
            assert engine.thread.is_alive()


def work(core: EngineCore, resting: threading.Event, seed: int) -> None:
    """Keep a few more requests in the engine than it can run; some of them share a prefix."""
    rng = random.Random(seed)
    while not resting.wait(0.005):
        while len(core.scheduler.requests) + core.inbox.qsize() < LIMITS.max_num_seqs + 4:
            prompt = [0] * 64 + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 200))]
            sampling = SamplingParams(max_tokens=rng.randrange(1, 120), ignore_eos=True)
            submit = Submit(prompt_token_ids=prompt, sampling=sampling)
            core.inbox.put(Call(submit, SilentClient(), prompt))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
