"""The input and output of models of step times."""

import pytest

from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep
from stepscope.engine.simulation.step_time import CostModel, StepShape, shape_of


def row(phase: Phase, start: int, num_tokens: int) -> ScheduledRow:
    request = Request(0, [1] * 100, SamplingParams(max_tokens=9), arrival_ns=0)
    return ScheduledRow(request, phase, start, num_tokens, samples=True)


def test_the_shape_of_a_step_counts_computed_and_attended_tokens() -> None:
    rows = [row(Phase.DECODE, 9, 1), row(Phase.DECODE, 99, 1), row(Phase.PREFILL, 10, 4)]
    assert shape_of(ScheduledStep(0, rows)) == StepShape(
        num_rows=3,
        num_decodes=2,
        num_prefill_tokens=4,
        num_prefill_pairs=11 + 12 + 13 + 14,
        num_context_tokens=10 + 100,
        num_prefill_context=14,
    )


def test_recomputed_tokens_and_padding_count_as_prefill() -> None:
    shape = shape_of(ScheduledStep(0, [row(Phase.RECOMPUTE, 0, 8)], num_padded_tokens=5))
    assert (shape.num_tokens, shape.num_prefill_tokens, shape.num_prefills) == (13, 13, 1)


def test_the_cycle_time_of_a_step_is_device_plus_host_time() -> None:
    cost = CostModel(floor_ms=2.0, token_us=100.0, context_ns=0.0, host_ms=0.5)
    time = cost.step_time(StepShape(8, 8, 0, 0, 800))
    assert time.device_s == pytest.approx(2.8e-3)
    assert time.cycle_s == pytest.approx(3.3e-3)
