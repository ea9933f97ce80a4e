"""`DrawnStepTimes`: adds random spread to a model's step times, from a seed."""

import math
import random

from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel


class DrawnStepTimes:
    """A `StepTimeModel` that draws log-normal device times around those of another model.

    Their mean is the other model's time. Each call draws a new time.

    Attributes:
        num_extrapolated: steps so far whose times the other model extrapolated.
    """

    def __init__(self, model: StepTimeModel, seed: int) -> None:
        self.num_extrapolated = 0
        self._model = model
        self._gauss = random.Random(seed).gauss

    def step_time(self, shape: StepShape) -> StepTime:
        device_s, host_s, spread, is_extrapolated = self._model.step_time(shape)
        self.num_extrapolated += is_extrapolated
        if spread:
            device_s *= math.exp(spread * self._gauss(0.0, 1.0) - spread * spread / 2)
        return StepTime(device_s, host_s, 0.0, is_extrapolated)
