"""`PausingRunner`: a model that computes nothing, and what its thread does meanwhile.

What a step's bookkeeping costs depends on what ran before it: its code and data are in the caches,
or have to come from memory again.
"""

import time
from collections.abc import Callable

from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.simulation.step_time import CostModel

_WEIGHTS = bytearray(12_000_000)


def _spin(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _read_memory(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        bytes(_WEIGHTS)


PAUSES: dict[str, Callable[[float], None]] = {
    "none": lambda seconds: None,  # steps follow one another
    "spin": _spin,  # like a thread that waits for a GPU
    "sleep": time.sleep,  # the core may run other threads, or rest
    "memory": _read_memory,  # like a model on this core
}


class PausingRunner(SimulatedRunner):
    """A runner whose step takes so many seconds, in one of these ways."""

    def __init__(self, pause: str, pause_s: float = 0.002) -> None:
        super().__init__(CostModel())
        self._pause_s = pause_s
        self._pause = PAUSES[pause]

    def execute(self, step: ScheduledStep) -> StepResult:
        self._pause(self._pause_s)
        return super().execute(step)
