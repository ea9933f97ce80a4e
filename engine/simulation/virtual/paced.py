"""`PacedRunner`: simulated steps in the time of the wall clock, or so many times faster.

What the scheduler takes of the host is no part of virtual time: the clock stands still after a step
until the next one begins, or for `_SETTLE_NS` at most; then the engine is idle, and it goes on.
"""

import time

from stepscope.engine.loop.pending_step import Unlaunched
from stepscope.engine.scheduling.step import InFlight, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import START_NS, SimulatedRunner
from stepscope.engine.simulation.step_time import StepTimeModel

_SETTLE_NS = 20_000_000  # of wall time


class PacedRunner:
    """`Runner` that sleeps while a step runs. Its clock may be read from any thread.

    Args:
        speed: virtual seconds in one of the wall clock, as far as the host can keep up.
    """

    def __init__(self, model: StepTimeModel, seed: int, speed: float) -> None:
        self._runner = SimulatedRunner(model, seed)
        self._speed = speed
        self._anchor = START_NS, time.monotonic_ns()  # virtual and wall time of one instant
        self._end_ns = START_NS  # of the step under way, or the last one
        self._ended_wall_ns: int | None = 0  # None: one is under way

    def clock(self) -> int:
        wall_ns = time.monotonic_ns()
        ended_wall_ns, end_ns = self._ended_wall_ns, self._end_ns
        if ended_wall_ns is None:
            return min(self._virtual_ns(wall_ns), end_ns)
        if wall_ns - ended_wall_ns < _SETTLE_NS:
            return end_ns
        return max(self._virtual_ns(wall_ns), end_ns)

    def execute(self, step: ScheduledStep) -> StepResult:
        self._runner.advance_to(self.clock())
        result = self._runner.execute(step)
        self._end_ns, self._ended_wall_ns = result.tokens_ns, None
        begun_ns, begun_wall_ns = self._anchor
        due_ns = begun_wall_ns + round((result.tokens_ns - begun_ns) / self._speed)
        left_ns = due_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        else:  # the host cannot keep up: what it is late is not made up for
            self._anchor = result.tokens_ns, time.monotonic_ns()
        self._ended_wall_ns = time.monotonic_ns()
        return result

    def launch(self, step: ScheduledStep) -> InFlight:
        return Unlaunched(self, step)

    def _virtual_ns(self, wall_ns: int) -> int:
        virtual_ns, begun_wall_ns = self._anchor
        return virtual_ns + round((wall_ns - begun_wall_ns) * self._speed)
