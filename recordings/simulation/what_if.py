"""`what_if`: a recorded session again, under its own knobs and under others.

The arrivals, lengths and prefix hits are the recorded ones, the scheduler is the real one, and the
times of steps are fitted on the recording. Each case is simulated several times: with chance in
each step, and with the machine as much faster or slower as it was from one window of the recording
to the next (drift), around a mean that is resampled from those windows (bootstrap).
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.fitted import FittedModel, SeenStep
from stepscope.engine.simulation.virtual.cluster import TimedKnobs, run_cluster
from stepscope.engine.simulation.virtual.drawn import DrawnStepTimes
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.simulation.figures import Figures, flat
from stepscope.recordings.simulation.recorded import RecordedWork
from stepscope.recordings.state.series.latency import SLO

NUM_RUNS = 20
WINDOW_NS = 4_000_000_000
_MIN_BUSY = 0.2  # of a window, to judge by it
_MIN_WINDOWS = 4
_LOW, _HIGH = 0.05, 0.95


class Predicted(NamedTuple):
    """One figure: the median of the runs, and where nine in ten of them lie."""

    value: float
    low: float
    high: float


class Drift(NamedTuple):
    """How fast the machine was in each window, as the logarithm of actual over fitted time."""

    windows: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return statistics.stdev(self.windows)

    def scale(self, seed: int) -> float:
        """Of all step times in one run."""
        source = random.Random(seed)
        mean = statistics.fmean(source.choices(self.windows, k=len(self.windows)))
        return math.exp(mean + source.gauss(0.0, self.spread))


class Forecast(NamedTuple):
    """One set of knobs, and what it comes to, by figure."""

    text: str
    figures: dict[str, Predicted]
    share_extrapolated: float  # of the steps, that are unlike any in the recording


class WhatIf(NamedTuple):
    """The recording, the same simulated, and each variant."""

    recorded: dict[str, float | None]
    again: Forecast
    variants: list[Forecast]
    drift: float  # spread between windows


def drift_of(steps: Sequence[tuple[int, SeenStep]], model: FittedModel) -> Drift:
    """Raises RecordingError when the recording is too short to see any."""
    windows: dict[int, list[float]] = {}
    for time_ns, step in steps:
        sums = windows.setdefault(time_ns // WINDOW_NS, [0.0, 0.0])
        sums[0] += step.cycle_s
        sums[1] += model.step_time(step.shape).cycle_s
    ratios = tuple(
        math.log(real / fitted)
        for real, fitted in windows.values()
        if fitted > 0 and real * 1e9 >= _MIN_BUSY * WINDOW_NS
    )
    if len(ratios) < _MIN_WINDOWS:
        raise RecordingError(
            f"the engine was busy in {len(ratios)} windows of {WINDOW_NS / 1e9:g} s, a forecast "
            f"needs {_MIN_WINDOWS}: record longer, under load"
        )
    return Drift(ratios)


def what_if(
    setup: SimulatedSetup,
    work: RecordedWork,
    drift: Drift,
    variants: Sequence[tuple[str, Mapping[str, KnobValue]]],
    levels: Sequence[SLO],
    on_run: Callable[[float], bool] = lambda share: False,
) -> WhatIf | None:
    """Args: on_run: called with the share done before each run; True ends it all with None.

    Raises:
        ConfigError: knobs that do not go together.
    """
    cases = []
    wanted: list[tuple[str, Mapping[str, KnobValue]]] = [("as recorded", {}), *variants]
    for number, (text, changes) in enumerate(wanted):
        runs: list[dict[str, float | None]] = []
        num_steps = num_extrapolated = 0
        for seed in range(NUM_RUNS):
            if on_run((number + seed / NUM_RUNS) / len(wanted)):
                return None
            figures, model = _run(setup, work, changes, levels, drift.scale(seed), seed)
            runs.append(flat(figures.result()))
            num_steps += figures.num_steps
            num_extrapolated += model.num_extrapolated
        cases.append(Forecast(text, _predicted(runs), num_extrapolated / max(1, num_steps)))
    recorded = flat(work.figures)
    again, *rest = cases
    widened = [
        case._replace(figures=_widened(case.figures, again.figures, recorded)) for case in rest
    ]
    return WhatIf(recorded, again, widened, drift.spread)


def _run(
    setup: SimulatedSetup,
    work: RecordedWork,
    changes: Mapping[str, KnobValue],
    levels: Sequence[SLO],
    scale: float,
    seed: int,
) -> tuple[Figures, DrawnStepTimes]:
    given = msgspec.structs.replace(setup, knobs=setup.knobs.changed(changes, setup.limits))
    model = DrawnStepTimes(setup.model, seed, scale)
    figures = Figures(levels)
    later = [
        TimedKnobs(each.time_ns, each.knobs.changed(changes, setup.limits)) for each in work.changes
    ]
    run_cluster([Replica(given.scheduler(), model, figures)], work.requests, changes=later)
    return figures, model


def _predicted(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Predicted]:
    found = {}
    for name in runs[0]:
        values = sorted(value for run in runs if (value := run[name]) is not None)
        if values:
            last = len(values) - 1
            ends = values[round(_LOW * last)], values[round(_HIGH * last)]
            found[name] = Predicted(statistics.median(values), *ends)
    return found


def _widened(
    figures: Mapping[str, Predicted],
    again: Mapping[str, Predicted],
    recorded: Mapping[str, float | None],
) -> dict[str, Predicted]:
    """No interval is narrower than what the simulation of the recording itself was off by."""
    found = dict(figures)
    for name, predicted in figures.items():
        real, simulated = recorded.get(name), again.get(name)
        if not real or simulated is None or not simulated.value:
            continue
        off = real / simulated.value
        found[name] = predicted._replace(
            low=min(predicted.low, predicted.value * min(1.0, off)),
            high=max(predicted.high, predicted.value * max(1.0, off)),
        )
    return found
