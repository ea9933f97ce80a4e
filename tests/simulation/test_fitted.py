"""A model of step times fitted to steps: its coefficients and what it reports about itself."""

import random
import statistics

import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.step_time import StepShape
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.session.regression import FittedModel, SeenStep, fit, fit_relative
from stepscope.recordings.simulation.basis import MachineStepTimes, speed_of
from stepscope.recordings.simulation.what_if import predicted

SECONDS = (8e-3, 40e-6, 30e-6, 10e-9, 30e-9, 2e-3)  # of each of `TERMS`


def shape(num_decodes: int, context: int, num_tokens: int = 0, start: int = 0) -> StepShape:
    return StepShape(
        num_rows=num_decodes + (num_tokens > 0),
        num_decodes=num_decodes,
        num_prefill_tokens=num_tokens,
        num_prefill_pairs=num_tokens * start + num_tokens * (num_tokens + 1) // 2,
        num_context_tokens=num_decodes * context,
        num_prefill_context=start + num_tokens if num_tokens else 0,
    )


def true_s(each: StepShape) -> float:
    return (
        SECONDS[0]
        + SECONDS[1] * each.num_prefill_tokens
        + SECONDS[2] * each.num_decodes
        + SECONDS[3] * each.num_prefill_pairs
        + SECONDS[4] * each.num_context_tokens
        + SECONDS[5] * each.num_prefills
    )


def steps(count: int = 800, noise: float = 0.02, stops: float = 0.0) -> list[SeenStep]:
    chance = random.Random(1)
    found = []
    for _ in range(count):
        num_tokens = chance.choice((0, 0, chance.randrange(1, 512)))
        each = shape(
            chance.randrange(1, 60), chance.randrange(100, 3000), num_tokens, chance.randrange(4000)
        )
        stop_s = 0.2 if chance.random() < stops else 0.0
        found.append(SeenStep(each, true_s(each) * chance.lognormvariate(0, noise) + stop_s, 1e-3))
    return found


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return fit(steps())


def test_the_fit_finds_the_coefficients_that_made_the_steps(model: FittedModel) -> None:
    assert model.seconds == pytest.approx(SECONDS, rel=0.1)


def test_a_few_interrupted_steps_change_a_fit_little() -> None:
    model = fit(steps(stops=0.03))
    assert model.seconds == pytest.approx(SECONDS, rel=0.15)
    assert model.spread < 0.03


def test_the_fitted_times_add_up_to_those_of_the_steps() -> None:
    noisy = steps(2000, noise=0.3)
    model = fit(noisy)
    found_s = sum(model.step_time(step.shape).cycle_s for step in noisy)
    assert found_s == pytest.approx(sum(step.cycle_s for step in noisy), rel=0.01)
    assert model.spread == pytest.approx(0.3, rel=0.1)


def test_no_fitted_coefficient_is_negative_and_one_without_steps_is_zero() -> None:
    rows = [(1.0, 0.0, float(number)) for number in range(1, 40)]
    rising = [5.0 + 2 * row[2] for row in rows]
    assert fit_relative(rows, rising) == pytest.approx([5, 0, 2])
    floor, _, slope = fit_relative(rows, [2.0 - row[2] / 40 for row in rows])
    assert (floor > 0, slope) == (True, 0.0)


def test_a_fit_reports_its_steps_and_error(model: FittedModel) -> None:
    assert model.num_steps == 800
    # Of steps with a spread of 2 % the median error is two thirds of it.
    assert model.median_error == pytest.approx(0.0135, rel=0.3)
    assert model.spread == pytest.approx(0.02, rel=0.3)
    assert "fitted on 800 steps" in model.in_words()


def test_fitted_host_and_device_time_add_up_to_the_cycle_time(model: FittedModel) -> None:
    each = shape(8, 500)
    time = model.step_time(each)
    assert time.host_s == pytest.approx(1e-3)
    assert time.cycle_s == pytest.approx(true_s(each), rel=0.02)


def test_predictions_far_outside_the_fitted_steps_are_marked(model: FittedModel) -> None:
    assert not model.step_time(shape(30, 1000, 256)).is_extrapolated
    assert model.step_time(shape(30, 1000, 4096)).is_extrapolated
    assert model.step_time(shape(120, 100)).is_extrapolated


def test_prefill_predictions_are_marked_if_no_fitted_step_had_a_prefill() -> None:
    decodes = [step for step in steps(1200) if not step.shape.num_prefill_tokens]
    assert fit(decodes).step_time(shape(8, 500, 64)).is_extrapolated


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (steps(40), "a fit takes 60 steps, and there are 40"),
        ([SeenStep(shape(8, 500), 0.01)] * 200, "too much alike"),
    ],
    ids=["few", "alike"],
)
def test_too_few_steps_to_fit_are_refused_with_a_remedy(given: list[SeenStep], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        fit(given)
    assert "record for longer" in str(error.value)


def machine_steps(count: int, slow_from: int | None = None) -> list[SeenStep]:
    """Steps of 10 ms plus 1 ms a decode; 1.5 times as long from `slow_from` on."""
    found = []
    for number in range(count):
        num_decodes = 1 + number % 12
        slow = 1.5 if slow_from is not None and number >= slow_from else 1.0
        shape = StepShape(num_decodes, num_decodes, 0, 0, num_decodes * 100)
        found.append(SeenStep(shape, (0.010 + 0.001 * num_decodes) * slow))
    return found


def test_a_steady_machine_is_simulated_with_the_fitted_times() -> None:
    seen = machine_steps(600)
    model = fit(seen)
    drawn = MachineStepTimes(model, speed_of(seen, model), seed=1)
    for step in seen:
        assert drawn.step_time(step.shape).cycle_s == pytest.approx(step.cycle_s, rel=0.02)


def test_simulated_sessions_of_a_machine_that_slowed_down_vary_in_speed() -> None:
    seen = machine_steps(800, slow_from=400)
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
    seen = machine_steps(100)
    with pytest.raises(RecordingError, match="busy for less than 5 s, too little for a forecast"):
        speed_of(seen, fit(seen))


def test_a_forecast_interval_is_wider_if_the_recording_had_only_one_budget() -> None:
    runs = [
        {
            "num_preemptions": each % 2,
            **dict.fromkeys(("ttft_p50_ms", "e2e_p50_ms", "goodput_per_s"), 100.0 + each),
        }
        for each in range(20)
    ]
    varied, fixed = (predicted(runs, is_varied=each) for each in (True, False))
    for found in (varied, fixed):
        low, value, high = found["ttft_p50_ms"].low, 109.5, found["ttft_p50_ms"].high
        assert found["ttft_p50_ms"].value == value
        assert low * high == pytest.approx(value * value)
    assert fixed["ttft_p50_ms"].high > varied["ttft_p50_ms"].high
    assert varied["num_preemptions"] == (0.5, 0.0, 1.0)
    assert varied["goodput_per_s"] == varied["e2e_p50_ms"]
