"""A long made-up session: a period of the simulated engine, played over and over.

Later numbers and times each time, and noise in its times as a real clock has it. Not a test.
"""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import common  # noqa: F401 - the repository is on the path
import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import EMPTY, Aborted, EngineInfo, EngineStatus, KVCounts
from stepscope.recordings.state.session import SessionState
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate

PERIOD_STEPS = 20_000
STEP_TIMES = ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns")


class Frame(NamedTuple):
    topic: bytes
    sequence: int
    payload: bytes


def period(num_requests: int, num_steps: int) -> list[Any]:
    """Messages of a session that ends without requests; the first is the engine's introduction."""
    workload = SimulatedWorkload(
        rate=17.0 * num_requests / 64,
        document_share=0.05,
        chat_tokens=300,
        document_tokens=1500,
        output_tokens=190,
    )
    told = simulate(
        seed=5,
        num_steps=num_steps,
        num_blocks=64 * num_requests,
        max_model_len=4096,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=num_requests),
        workload=workload,
        cost=CostModel(floor_ms=15.0, token_us=25.0, context_ns=2.0),
    )
    messages = [message for _, message in told]
    state = SessionState()
    for message in messages:
        state.apply(message)
    owners = state.block_owner
    live = [view for view in state.requests.values() if view.status != "finished"]
    end = EngineStatus(
        time_ns=state.time_ns,
        state="idle",
        step=state.step,
        num_running=0,
        num_waiting=0,
        kv=KVCounts(used=0, cached=0, empty=len(owners), evicted=0),
        moves=[
            wire.BlockMove(block, EMPTY, 0) for block, owner in enumerate(owners) if owner != EMPTY
        ],
        events=[Aborted(view.request_id, "end of the period") for view in live],
    )
    return [messages[0], *(m for m in messages if not isinstance(m, EngineInfo)), end]


class SyntheticSession:
    """Frames without an end.

    Args:
        num_requests: that run side by side.
        rate: steps in a second of the engine's time; None: as simulated, about 50.
        period_steps: after so many it begins again.

    Attributes:
        info: the engine's introduction, the message 0.
    """

    def __init__(
        self, num_requests: int, rate: float | None = None, period_steps: int = PERIOD_STEPS
    ) -> None:
        info, *rest = period(num_requests, period_steps)
        self.info: EngineInfo = info
        self._encoded = [(wire.TOPICS[type(m)], wire.encode(m)) for m in rest]
        self._num_steps = period_steps
        self._num_ids = 1 + max(e.request_id for m in rest for e in getattr(m, "events", ()))
        self._duration_ns = rest[-1].time_ns - info.monotonic_ns + 20_000_000
        simulated_rate = period_steps / self._duration_ns * 1e9
        self._scale = 1.0 if rate is None else simulated_rate / rate

    def frames(self) -> Iterator[Frame]:
        """The messages after `info`."""
        rng, sequence = random.Random(1), 0
        decode, encode = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
        for number in count():
            for topic, payload in self._encoded:
                message = decode(payload)
                self._shift(message, number, rng)
                sequence += 1
                yield Frame(topic, sequence, encode(message))

    def _shift(self, message: dict[str, Any], number: int, rng: random.Random) -> None:
        """Make a message one of the period `number`."""
        start_ns, first_id = self.info.monotonic_ns, number * self._num_ids

        def move(owner: dict[str, Any], name: str, noise_ns: int = 0) -> None:
            if name in owner:
                since_ns = owner[name] - start_ns + number * self._duration_ns
                owner[name] = start_ns + int(since_ns * self._scale) + noise_ns

        if message.get("step", -1) >= 0:
            message["step"] += number * self._num_steps
        noise_ns = 0
        for name in STEP_TIMES if "tokens_ns" in message else ():
            noise_ns += rng.randrange(1 + int(30_000 * self._scale))
            move(message, name, noise_ns)
        move(message, "time_ns")
        for row in message.get("batch", ()):
            row[0] += first_id
        for block_move in message.get("moves", ()):
            if block_move[1] >= 0:
                block_move[1] += first_id
        for event in message.get("events", ()):
            event["request_id"] += first_id
            move(event, "time_ns")


def cut(frames: Iterator[Frame], num_steps: int) -> Iterator[Frame]:
    """Those up to a number of steps."""
    while num_steps:
        yield (frame := next(frames))
        num_steps -= frame.topic == b"step"


def session(num_steps: int, num_requests: int) -> Iterator[Frame]:
    """Frames of a session of so many steps, its introduction first."""
    synthetic = SyntheticSession(num_requests)
    yield Frame(wire.TOPICS[EngineInfo], 0, wire.encode(synthetic.info))
    yield from cut(synthetic.frames(), num_steps)
