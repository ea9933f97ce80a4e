"""`MachineSpeed`: how step times deviated from their fit, to simulate a machine like that.

Slow steps come together, because their cause (another process, a hot processor) lasts for more than
one step. So the recorded step time is divided into windows of one second. A simulated session
repeats stretches of consecutive windows, each with its recorded mean deviation, and draws the
deviation of each step within a window at random. The session as a whole is also faster or slower
by a random factor with the spread of the windows.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.engine.simulation.fitted import FittedModel, SeenStep
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.recordings.errors import RecordingError

_WINDOW_S = 1.0  # step time in a window, without idle time
_MIN_WINDOWS = 5
_STRETCH = 4  # consecutive windows that are drawn together


class MachineSpeed(NamedTuple):
    """Deviations of step times from the fit, as logarithms of actual divided by fitted time."""

    windows: tuple[float, ...]  # the deviation of each window as a whole, in the order recorded
    # Deviations of steps that only decode, relative to their window, in ascending order.
    decodes: tuple[float, ...]
    # Deviations of steps with prefill, relative to their window, in ascending order.
    prefills: tuple[float, ...]

    @property
    def drift(self) -> float:
        """Standard deviation of `windows`."""
        return statistics.stdev(self.windows)


class MachineStepTimes:
    """A `StepTimeModel`: another model's times, with the deviations of the recorded machine."""

    def __init__(self, model: StepTimeModel, speed: MachineSpeed, seed: int) -> None:
        # Steps so far whose shape is unlike all shapes that the model was fitted on.
        self.num_extrapolated = 0
        self._model = model
        self._speed = speed
        self._random = random.Random(seed)
        self._session = self._random.gauss(0.0, speed.drift)
        self._stretch: Iterator[float] = iter(())
        self._scale = 1.0
        self._left_s = 0.0  # seconds left in the window

    def step_time(self, shape: StepShape) -> StepTime:
        device_s, host_s, _, is_extrapolated = self._model.step_time(shape)
        self.num_extrapolated += is_extrapolated
        if self._left_s <= 0:
            self._next_window()
        own = self._speed.prefills if shape.num_prefill_tokens else self._speed.decodes
        factor = self._scale * math.exp(self._random.choice(own) if own else 0.0)
        self._left_s -= (device_s + host_s) * factor
        return StepTime(device_s * factor, host_s * factor, 0.0, is_extrapolated)

    def _next_window(self) -> None:
        windows = self._speed.windows
        log_scale = next(self._stretch, None)
        if log_scale is None:
            begin = self._random.randrange(len(windows))
            self._stretch = (windows[(begin + at) % len(windows)] for at in range(_STRETCH))
            log_scale = next(self._stretch)
        self._scale = math.exp(self._session + log_scale)
        self._left_s = _WINDOW_S


def speed_of(steps: Sequence[SeenStep], model: FittedModel) -> MachineSpeed:
    """Measure how far the durations of `steps` deviate from `model`.

    Raises RecordingError: the engine was busy for too short a time to measure the drift.
    """
    windows: list[float] = []
    decodes: list[float] = []
    prefills: list[float] = []
    for window in _windows(steps):
        fitted = [model.step_time(step.shape).cycle_s for step in window]
        log_scale = math.log(sum(step.cycle_s for step in window) / sum(fitted))
        windows.append(log_scale)
        for step, fitted_s in zip(window, fitted, strict=True):
            own = prefills if step.shape.num_prefill_tokens else decodes
            own.append(math.log(step.cycle_s / fitted_s) - log_scale)
    if len(windows) < _MIN_WINDOWS:
        raise RecordingError(
            f"the engine was busy for less than {_MIN_WINDOWS * _WINDOW_S:g} s, too little for a "
            "forecast: record longer, under load"
        )
    return MachineSpeed(tuple(windows), tuple(sorted(decodes)), tuple(sorted(prefills)))


def _windows(steps: Sequence[SeenStep]) -> Iterator[list[SeenStep]]:
    window: list[SeenStep] = []
    seconds = 0.0
    for step in steps:
        if step.cycle_s <= 0:
            continue
        window.append(step)
        seconds += step.cycle_s
        if seconds >= _WINDOW_S:
            yield window
            window, seconds = [], 0.0
