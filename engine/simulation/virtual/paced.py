"""`PacedRunner`: simulated steps that take real time, or a fraction of it.

The real scheduler also takes time, which must not count as virtual time. So after a step the
virtual clock stops until the next step begins, for at most `_SETTLE_NS`. After that the engine
counts as idle, and the clock continues.
"""

import time

from stepscope.engine.loop.pending_step import Unlaunched
from stepscope.engine.scheduling.step import InFlight, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import START_NS, SimulatedRunner
from stepscope.engine.simulation.step_time import StepTimeModel

_SETTLE_NS = 20_000_000  # in real time


class PacedRunner:
    """A `Runner` that sleeps while a step runs. Its clock may be read from any thread.

    Args:
        speed: virtual seconds for each second of real time, as far as the host can keep up.
    """

    def __init__(self, model: StepTimeModel, seed: int, speed: float) -> None:
        self._runner = SimulatedRunner(model, seed)
        self._speed = speed
        self._anchor = START_NS, time.monotonic_ns()  # virtual and real time of one instant
        self._end_ns = START_NS  # virtual end of the running step, or of the last one
        self._ended_wall_ns: int | None = 0  # real end of the last step; None while one runs

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
        else:  # the host cannot keep up; do not run faster later to make up for it
            self._anchor = result.tokens_ns, time.monotonic_ns()
        self._ended_wall_ns = time.monotonic_ns()
        return result

    def launch(self, step: ScheduledStep) -> InFlight:
        return Unlaunched(self, step)

    def _virtual_ns(self, wall_ns: int) -> int:
        virtual_ns, begun_wall_ns = self._anchor
        return virtual_ns + round((wall_ns - begun_wall_ns) * self._speed)
