"""The step times that an engine measures at its start."""

import pytest

from stepscope.engine.execution import step_costs
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.workload.arrivals import in_words
from tests.support.engines.cost_model import CostModel


class Trialled(SimulatedRunner):
    """A runner with known costs that notes the size of each step."""

    num_blocks, block_size, max_model_len = 64, 16, 4096

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self.sizes: list[int] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        self.sizes.append(sum(row.num_tokens for row in step.rows))
        return super().execute(step)


def test_measured_step_costs_equal_those_of_the_model_runner() -> None:
    runner = Trialled(CostModel(floor_ms=2.0, token_us=100.0, context_ns=0.0))
    costs = step_costs.measure(runner)
    # Each step also takes a fifth of a millisecond to be scheduled.
    assert costs.decode_ms == pytest.approx(2.0 + 8 * 0.1 + 0.2)
    assert costs.prefill_ms == pytest.approx(2.0 + 400 * 0.1 + 0.2)
    assert costs.stream_ms == pytest.approx(2.0 + 0.1 + 0.2)
    assert (costs.num_streams, costs.num_prefill_tokens) == (8, 400)
    assert in_words(costs) == "decode of 8 streams 3.0 ms a step, prefill of 400 tokens 42 ms"


@pytest.mark.parametrize(("floor_ms", "num_runs"), [(1.0, step_costs.MOST_RUNS), (900.0, 1)])
def test_kinds_of_steps_take_turns_and_delay_the_start_by_a_bounded_time(
    floor_ms: float, num_runs: int
) -> None:
    runner = Trialled(CostModel(floor_ms=floor_ms, token_us=20.0, context_ns=0.0))
    step_costs.measure(runner)
    assert runner.sizes == [8, 1, 400] * num_runs


def test_step_costs_of_a_model_with_short_requests_use_short_prompts() -> None:
    runner = Trialled(CostModel())
    runner.max_model_len = 16
    assert step_costs.measure(runner).num_prefill_tokens == 32
    assert max(runner.sizes) == 32
