"""`MachineSpeed`: how a recorded machine departed from its fit, and sessions drawn from that.

Steps are slow together: what stops one (another process, a hot processor) lasts for more of them.
So a drawn session takes stretches of the recorded one, and within them draws each step's own
departure. As a whole it is faster or slower too, by as much as a window was.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.engine.simulation.fitted import FittedModel, SeenStep
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.recordings.errors import RecordingError

_WINDOW_S = 1.0  # of steps, idle time left out
_MIN_WINDOWS = 5
_STRETCH = 4  # windows that are drawn together


class MachineSpeed(NamedTuple):
    """All are logarithms of actual over fitted time; those of steps beside their window's.

    Of steps that only decode, and of those that prefill, each in ascending order.
    """

    windows: tuple[float, ...]
    decodes: tuple[float, ...]
    prefills: tuple[float, ...]

    @property
    def drift(self) -> float:
        """Standard deviation of the windows."""
        return statistics.stdev(self.windows)


class MachineStepTimes:
    """A `StepTimeModel`: those of another one, on a machine as the recorded one was.

    Attributes:
        num_extrapolated: steps so far that the model has seen nothing like.
    """

    def __init__(self, model: StepTimeModel, speed: MachineSpeed, seed: int) -> None:
        self.num_extrapolated = 0
        self._model = model
        self._speed = speed
        self._random = random.Random(seed)
        self._session = self._random.gauss(0.0, speed.drift)
        self._stretch: Iterator[float] = iter(())
        self._scale = 1.0
        self._left_s = 0.0  # of the window

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
    """Of steps in the order they ran.

    Raises:
        RecordingError: they are too few to see any drift.
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
