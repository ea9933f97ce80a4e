"""Sessions in which steps take far longer than their work."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.simulated import CostModel, SimulatedWorkload, simulate
from stepscope.recordings.attribution.causes import Late, Piece

MS = 1_000_000
HELD_MS = 840
CHATS = SimulatedWorkload(rate=3.0, document_tokens=2500, output_tokens=90)


@dataclass
class NoisyCost:
    """A cost model with noise; steps that `holds` names take `HELD_MS` longer."""

    base: CostModel = field(default_factory=CostModel)
    holds: Callable[[ScheduledStep], bool] = lambda step: False
    noise: float = 0.25
    slow: list[int] = field(default_factory=list)  # the steps that were

    def __post_init__(self) -> None:
        self._random = random.Random(1)

    def duration_ns(self, step: ScheduledStep) -> int:
        ns = self.base.duration_ns(step) * self._random.uniform(1, 1 + self.noise)
        if self.holds(step):
            self.slow.append(step.step)
            ns += HELD_MS * MS
        return round(ns)


def session(cost: NoisyCost, **options: Any) -> list[tuple[int, Telemetry]]:
    options = {"seed": 3, "num_steps": 900, "workload": CHATS, **options}
    messages = simulate(cost=cast(CostModel, cost), **options)
    return [(number, wire.decode(wire.encode(message))) for number, message in messages]


def once_beside_a_prompt(after: int, num_tokens: int = 64) -> Callable[[ScheduledStep], bool]:
    """The first step after some that computes so much of a prompt beside decodes."""
    done: list[int] = []

    def holds(step: ScheduledStep) -> bool:
        largest = max(row.num_tokens for row in step.rows)
        smallest = min(row.num_tokens for row in step.rows)
        if done or step.step < after or largest < num_tokens or smallest > 1:
            return False
        done.append(step.step)
        return True

    return holds


def slow_pieces(waits: Iterable[Late]) -> list[Piece]:
    return [piece for late in waits for piece in late.pieces if piece.cause == "held_up"]
