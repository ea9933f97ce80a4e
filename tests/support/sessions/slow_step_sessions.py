"""Sessions in which steps take far longer than their work."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.simulation.step_time import StepShape, StepTime
from stepscope.recordings.attribution.causes import Late, Piece
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate

MS = 1_000_000
HELD_MS = 840
CHATS = SimulatedWorkload(rate=3.0, document_tokens=2500, output_tokens=90)


@dataclass
class NoisyCost:
    """A cost model with noise; steps that `holds` names take `HELD_MS` longer."""

    base: CostModel = field(default_factory=CostModel)
    holds: Callable[[int, StepShape], bool] = lambda step, shape: False
    noise: float = 0.25
    step: int = 0  # the next one
    slow: list[int] = field(default_factory=list)  # the steps that were

    def __post_init__(self) -> None:
        self._random = random.Random(1)

    def step_time(self, shape: StepShape) -> StepTime:
        time = self.base.step_time(shape)
        seconds = time.device_s * self._random.uniform(1, 1 + self.noise)
        if self.holds(self.step, shape):
            self.slow.append(self.step)
            seconds += HELD_MS / 1e3
        self.step += 1
        return time._replace(device_s=seconds)


def session(cost: NoisyCost, **options: Any) -> list[tuple[int, Telemetry]]:
    options = {"seed": 3, "num_steps": 900, "workload": CHATS, **options}
    messages = simulate(cost=cost, **options)
    return [(number, wire.decode(wire.encode(message))) for number, message in messages]


def once_beside_a_prompt(after: int, num_tokens: int = 64) -> Callable[[int, StepShape], bool]:
    """Slow down the first step, after some others, with a large prefill chunk beside decodes."""
    done: list[int] = []

    def holds(step: int, shape: StepShape) -> bool:
        if done or step < after or shape.num_prefill_tokens < num_tokens or not shape.num_decodes:
            return False
        done.append(step)
        return True

    return holds


def slow_pieces(waits: Iterable[Late]) -> list[Piece]:
    return [piece for late in waits for piece in late.pieces if piece.cause == "held_up"]
