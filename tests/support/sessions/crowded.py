"""`crowded`: sessions of many requests in little memory."""

from collections.abc import Mapping, Sequence

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue, Telemetry
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.later import Later


def crowded(
    seed: int,
    num_steps: int,
    rate: float,
    changes: Mapping[int, dict[str, KnobValue]] | None = None,
    floor_ms: float = 8.0,
) -> Sequence[tuple[int, Telemetry]]:
    """Prefix hits, evictions and preemptions within some hundred steps.

    `changes`: knobs to set before a step. `floor_ms`: the least time of a step.
    """
    return Later(
        lambda: simulate(
            seed,
            num_steps,
            num_blocks=160,
            max_model_len=2048,
            workload=SimulatedWorkload(
                rate=rate, document_share=0.1, chat_tokens=150, document_tokens=900
            ),
            knobs=Knobs(max_num_batched_tokens=512, reserve="none"),
            changes=dict(changes or {}),
            cost=CostModel(floor_ms=floor_ms),
        )
    )
