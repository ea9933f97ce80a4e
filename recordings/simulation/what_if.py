"""`what_if`: simulates a recorded session under its own knobs and under others.

Arrivals, lengths and prefix hits are the recorded ones. The scheduler is the engine's own code, and
step times are fitted on the recording. Each set of knobs is simulated several times, each time with
other random deviations of step times, drawn from those of the recorded machine.

The intervals are conformal (Vovk et al., "Algorithmic Learning in a Random World", 2005; scores
scaled as in Papadopoulos et al., 2008): the half width is the spread of the runs times a factor.
The factors were chosen between those of a quiet and of a disturbed machine, so that about nine in
ten real sessions fall into the interval on both (docs/simulate.md).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.replica import Replica
from stepscope.engine.simulation.virtual_session import TimedKnobs, run_requests
from stepscope.recordings.simulation.basis import MachineStepTimes, WhatIfBasis
from stepscope.recordings.simulation.figures import RunSums, flat
from stepscope.recordings.state.latency import SLO

# Prefix of a figure's name -> factor, from pairs of real runs (docs/simulate.md); rates and shares
# have that of "e2e". `_VARIED` is for recordings with several values of their knobs, `_FIXED` for
# those with one.
_VARIED = {"ttft": 2.5, "itl": 1.9, "e2e": 2.0}
_FIXED = {"ttft": 3.6, "itl": 1.9, "e2e": 2.4}
_LEAST = 0.03  # least spread of the logarithm, as no two sessions are closer


class Predicted(NamedTuple):
    """A predicted figure: the median of the runs, and an interval for nine in ten sessions."""

    value: float
    low: float
    high: float


def predicted(
    runs: Sequence[Mapping[str, float | None]], *, is_varied: bool
) -> dict[str, Predicted]:
    """Return the prediction of each figure that has a value in at least one run.

    `runs`: name -> value of the figures of each run.
    `is_varied`: whether the recording has steps under several values of its knobs.
    """
    factors = _VARIED if is_varied else _FIXED
    found = {}
    for name in runs[0]:
        values = sorted(value for run in runs if (value := run[name]) is not None)
        if not values:
            continue
        median = statistics.median(values)
        if values[0] <= 0 or len(values) < 2:  # counts and shares that may be zero
            low, high = (values[round(share * (len(values) - 1))] for share in (0.05, 0.95))
        else:
            times = factors.get(name.partition("_")[0], factors["e2e"])
            spread = statistics.pstdev(math.log(value) for value in values)
            factor = math.exp(times * math.hypot(spread, _LEAST))
            low, high = median / factor, median * factor
        found[name] = Predicted(median, low, high)
    return found


NUM_RUNS = 20


class ForecastStopped(Exception):  # noqa: N818 - reads as what happened
    """The caller's `on_run` stopped it before all forecasts were done."""


class Forecast(NamedTuple):
    text: str
    figures: dict[str, Predicted]
    share_extrapolated: float  # share of steps unlike any in the recording
    runs: list[dict[str, float | None]]  # the figures of each run, in order of seeds


class WhatIf(NamedTuple):
    """The recorded figures, the forecast with the recorded knobs, and one for each variant."""

    recorded: dict[str, float | None]
    again: Forecast
    variants: list[Forecast]
    drift: float  # `MachineSpeed.drift`


def what_if(
    basis: WhatIfBasis,
    variants: Sequence[tuple[str, Mapping[str, KnobValue]]],
    level: SLO,
    on_run: Callable[[float], bool] = lambda share: False,
    num_runs: int = NUM_RUNS,
) -> WhatIf:
    """Forecast a recorded session with its own knobs and with each variant of them.

    `on_run`: called before each run with the share of all runs done.

    Raises:
        ForecastStopped: `on_run` returned True.
        ConfigError: the knobs of a variant are incompatible.
    """
    wanted: list[tuple[str, Mapping[str, KnobValue]]] = [("as recorded", {}), *variants]

    def on_case(number: int, share: float) -> bool:
        return on_run((number + share) / len(wanted))

    again, *rest = [
        forecast(basis, text, changes, level, partial(on_case, number), num_runs)
        for number, (text, changes) in enumerate(wanted)
    ]
    return WhatIf(flat(basis.work.figures), again, rest, basis.speed.drift)


def forecast(
    basis: WhatIfBasis,
    text: str,
    changes: Mapping[str, KnobValue],
    level: SLO,
    on_run: Callable[[float], bool] = lambda share: False,
    num_runs: int = NUM_RUNS,
) -> Forecast:
    """Forecast a recorded session with `changes` to its knobs, in `num_runs` runs.

    Runs with the same seed simulate the same random machine, whatever the knobs.

    `on_run`: called before each run with the share of the runs done.

    Raises:
        ForecastStopped: `on_run` returned True.
        ConfigError: the knobs are incompatible.
    """
    runs: list[dict[str, float | None]] = []
    num_steps = num_extrapolated = 0
    for seed in range(num_runs):
        if on_run(seed / num_runs):
            raise ForecastStopped
        figures, model = run_once(basis, changes, level, seed)
        runs.append(flat(figures.result()))
        num_steps += figures.num_steps
        num_extrapolated += model.num_extrapolated
    found = predicted(runs, is_varied=bool(basis.work.changes))
    return Forecast(text, found, num_extrapolated / max(1, num_steps), runs)


def run_once(
    basis: WhatIfBasis, changes: Mapping[str, KnobValue], level: SLO, seed: int
) -> tuple[RunSums, MachineStepTimes]:
    """Simulate a session once. Returns its figures and the model of step times that it used."""
    setup = basis.setup
    given = msgspec.structs.replace(setup, knobs=setup.knobs.changed(changes, setup.limits))
    model = MachineStepTimes(setup.model, basis.speed, seed)
    figures = RunSums(level)
    replica = Replica(given.scheduler(), model, figures, overlap=given.overlap)
    run_requests(replica, basis.work.requests, changes=later_knobs(basis, changes))
    return figures, model


def later_knobs(basis: WhatIfBasis, changes: Mapping[str, KnobValue]) -> list[TimedKnobs]:
    """Return the recorded knob changes with their times. `changes` override their values."""
    limits = basis.setup.limits
    return [
        TimedKnobs(each.time_ns, each.knobs.changed(changes, limits)) for each in basis.work.changes
    ]
