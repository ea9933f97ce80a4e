"""The step times that an engine measures at its start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.execution import step_costs
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.workload.arrivals import in_words


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


@given(floor_ms=st.floats(0.1, 3_000.0), token_us=st.floats(1.0, 5_000.0))
def test_measuring_step_costs_delays_the_start_by_a_bounded_time(
    floor_ms: float, token_us: float
) -> None:
    """One step of each kind is always run, to warm up; the time for further steps is bounded."""
    runner = Trialled(CostModel(floor_ms=floor_ms, token_us=token_us))
    before_ns = runner.clock()
    step_costs.measure(runner)
    counts = [runner.sizes.count(each) for each in (8, 400, 1)]
    assert min(counts) >= 1
    cost = CostModel(floor_ms=floor_ms, token_us=token_us)
    step_ms = [cost.floor_ms + tokens * cost.token_us / 1000 for tokens in (8, 400, 1)]
    allowed_ms = [
        each / 1e6 for each in (step_costs.DECODE_NS, step_costs.PREFILL_NS, step_costs.STREAM_NS)
    ]
    for count, each_ms, most_ms in zip(counts, step_ms, allowed_ms, strict=True):
        # One step may begin just before the time is up; one that takes a second never does.
        assert count == 1 or (count - 2) * each_ms <= most_ms
        assert count == 1 or each_ms < 1_000.0
    assert runner.clock() > before_ns


def test_step_cost_measurements_alternate_between_kinds_of_steps() -> None:
    """The kinds take turns: none is measured completely before the next."""
    runner = Trialled(CostModel(floor_ms=1.0, token_us=50.0, context_ns=0.0))
    step_costs.measure(runner)
    assert {8, 1, 400} == set(runner.sizes[:3]) == set(runner.sizes[3:6])


def test_step_costs_of_a_model_with_short_requests_use_short_prompts() -> None:
    runner = Trialled(CostModel())
    runner.max_model_len = 16
    assert step_costs.measure(runner).num_prefill_tokens == 32
    assert max(runner.sizes) == 32
