"""`PacedRunner`: the simulated runner in real time."""

import time

from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.simulation.step_time import shape_of


class PacedRunner(SimulatedRunner):
    """A simulated runner that sleeps as long as its cost model says."""

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        launch_ns = time.monotonic_ns()
        token_ids = super().execute(step).token_ids
        time.sleep(self._cost.step_time(shape_of(step)).device_s)
        return StepResult(token_ids, launch_ns=launch_ns, tokens_ns=time.monotonic_ns())
