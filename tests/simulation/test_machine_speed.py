"""Simulated sessions whose speed varies as a recorded machine deviated from its fit."""

import statistics

import pytest

from stepscope.engine.simulation.fitted import SeenStep, fit
from stepscope.engine.simulation.step_time import StepShape
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.simulation.machine_speed import MachineStepTimes, speed_of
from stepscope.recordings.simulation.what_if import predicted, widening


def steps(count: int, slow_from: int | None = None) -> list[SeenStep]:
    """Steps of 10 ms plus 1 ms a decode; 1.5 times as long from `slow_from` on."""
    found = []
    for number in range(count):
        num_decodes = 1 + number % 12
        slow = 1.5 if slow_from is not None and number >= slow_from else 1.0
        shape = StepShape(num_decodes, num_decodes, 0, 0, num_decodes * 100)
        found.append(SeenStep(shape, (0.010 + 0.001 * num_decodes) * slow))
    return found


def test_a_steady_machine_is_simulated_with_the_fitted_times() -> None:
    seen = steps(600)
    model = fit(seen)
    drawn = MachineStepTimes(model, speed_of(seen, model), seed=1)
    for step in seen:
        assert drawn.step_time(step.shape).cycle_s == pytest.approx(step.cycle_s, rel=0.02)


def test_simulated_sessions_of_a_machine_that_slowed_down_vary_in_speed() -> None:
    seen = steps(800, slow_from=400)
    model = fit(seen)
    speed = speed_of(seen, model)
    assert speed.drift > 0.1
    totals = []
    for seed in range(30):
        drawn = MachineStepTimes(model, speed, seed)
        totals.append(sum(drawn.step_time(step.shape).cycle_s for step in seen))
    real = sum(step.cycle_s for step in seen)
    assert min(totals) < 0.9 * real
    assert max(totals) > 1.1 * real
    assert statistics.median(totals) == pytest.approx(real, rel=0.15)
    again = MachineStepTimes(model, speed, 7)
    assert sum(again.step_time(step.shape).cycle_s for step in seen) == totals[7]


def test_a_few_seconds_of_work_are_too_little_to_measure_drift_of_the_machine_speed() -> None:
    seen = steps(100)
    with pytest.raises(RecordingError, match="busy for less than 5 s, too little for a forecast"):
        speed_of(seen, fit(seen))


def test_a_forecast_interval_is_wider_if_the_recording_had_only_one_budget() -> None:
    runs = [{"ttft_p50_ms": 100.0 + each, "num_preemptions": each % 2} for each in range(20)]
    varied, fixed = (predicted(runs, is_varied=each) for each in (True, False))
    for found in (varied, fixed):
        low, value, high = found["ttft_p50_ms"].low, 109.5, found["ttft_p50_ms"].high
        assert found["ttft_p50_ms"].value == value
        assert low * high == pytest.approx(value * value)
    assert fixed["ttft_p50_ms"].high > varied["ttft_p50_ms"].high
    assert varied["num_preemptions"] == (0.5, 0.0, 1.0)
    assert widening("goodput_0_per_s", is_varied=True) == widening("e2e_p50_ms", is_varied=True)
