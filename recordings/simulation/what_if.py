"""`what_if`: simulates a recorded session under its own knobs and under others.

Arrivals, lengths and prefix hits are the recorded ones. The scheduler is the engine's own code, and
step times are fitted on the recording. Each set of knobs is simulated several times, each time with
other random deviations of step times, drawn from those of the recorded machine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.virtual.cluster import TimedKnobs, run_cluster
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.simulation.figures import RunSums, flat
from stepscope.recordings.simulation.intervals import Predicted, predicted
from stepscope.recordings.simulation.machine_speed import MachineStepTimes
from stepscope.recordings.state.series.latency import SLO

NUM_RUNS = 20


class ForecastStopped(Exception):  # noqa: N818 - reads as what happened
    """The caller's `on_run` stopped a search or diagnosis before its forecasts were done."""


class Forecast(NamedTuple):
    """The predicted figures of a session under one set of knobs."""

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
    levels: Sequence[SLO],
    on_run: Callable[[float], bool] = lambda share: False,
    num_runs: int = NUM_RUNS,
) -> WhatIf | None:
    """Forecast a recorded session with its own knobs and with each variant of them.

    Args:
        on_run: called before each run with the share of all runs done. If it returns True, the
            result is None.

    Raises ConfigError: the knobs of a variant are incompatible.
    """
    cases = []
    wanted: list[tuple[str, Mapping[str, KnobValue]]] = [("as recorded", {}), *variants]
    for number, (text, changes) in enumerate(wanted):

        def on_case(share: float, number: int = number) -> bool:
            return on_run((number + share) / len(wanted))

        case = forecast(basis, text, changes, levels, on_case, num_runs)
        if case is None:
            return None
        cases.append(case)
    again, *rest = cases
    return WhatIf(flat(basis.work.figures), again, rest, basis.speed.drift)


def forecast(
    basis: WhatIfBasis,
    text: str,
    changes: Mapping[str, KnobValue],
    levels: Sequence[SLO],
    on_run: Callable[[float], bool] = lambda share: False,
    num_runs: int = NUM_RUNS,
) -> Forecast | None:
    """Forecast a recorded session with `changes` to its knobs, in `num_runs` runs.

    Runs with the same seed simulate the same random machine, whatever the knobs.

    `on_run`: called before each run with the share of the runs done. If it returns True, the result
    is None.

    Raises ConfigError: the knobs are incompatible.
    """
    runs: list[dict[str, float | None]] = []
    num_steps = num_extrapolated = 0
    for seed in range(num_runs):
        if on_run(seed / num_runs):
            return None
        figures, model = run_once(basis, changes, levels, seed)
        runs.append(flat(figures.result()))
        num_steps += figures.num_steps
        num_extrapolated += model.num_extrapolated
    found = predicted(runs, is_varied=bool(basis.work.changes))
    return Forecast(text, found, num_extrapolated / max(1, num_steps), runs)


def run_once(
    basis: WhatIfBasis, changes: Mapping[str, KnobValue], levels: Sequence[SLO], seed: int
) -> tuple[RunSums, MachineStepTimes]:
    """Simulate a session once. Returns its figures and the model of step times that it used."""
    setup = basis.setup
    given = msgspec.structs.replace(setup, knobs=setup.knobs.changed(changes, setup.limits))
    model = MachineStepTimes(setup.model, basis.speed, seed)
    figures = RunSums(levels)
    replica = Replica(given.scheduler(), model, figures, overlap=given.overlap)
    run_cluster([replica], basis.work.requests, changes=later_knobs(basis, changes))
    return figures, model


def later_knobs(basis: WhatIfBasis, changes: Mapping[str, KnobValue]) -> list[TimedKnobs]:
    """Return the recorded knob changes with their times. `changes` override their values."""
    limits = basis.setup.limits
    return [
        TimedKnobs(each.time_ns, each.knobs.changed(changes, limits)) for each in basis.work.changes
    ]
