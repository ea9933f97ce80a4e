"""`SimulatedRunner`: modelled step times, a virtual clock, and made-up tokens.

It never reads the host's clock, so an engine with it gives the same messages for the same seed.
"""

from typing import NamedTuple

from stepscope.engine.scheduling.acceptance import bursts_of, has_drafts
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep, StepResult
from stepscope.engine.simulation.step_time import StepTimeModel, shape_of

START_NS = 1_000_000_000_000
WALL_START_NS = 1_700_000_000_000_000_000  # 2023-11-14T22:13:20Z
VOCAB_SIZE = 4096


class SimulatedRunner:
    """A `Runner` with a virtual clock, which advances only by the times that `cost` predicts."""

    def __init__(self, cost: StepTimeModel, seed: int = 0) -> None:
        self._cost = cost
        self._seed = seed
        self._now_ns = START_NS
        self._device_free_ns = START_NS

    def clock(self) -> int:
        return self._now_ns

    def advance_to(self, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)

    def execute(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).collect()

    def launch(self, step: ScheduledStep) -> "SimulatedStep":
        """Start a step: advance the clock by the host's time, and compute when the step ends."""
        time = self._cost.step_time(shape_of(step))
        self._now_ns = launch_ns = self._now_ns + round(time.host_s * 1e9)
        begin_ns = max(launch_ns, self._device_free_ns)
        self._device_free_ns = begin_ns + round(time.device_s * 1e9)
        token_ids = [
            self._token(row, row.start + row.num_tokens) if row.samples else None
            for row in step.rows
        ]
        guessed = {
            index: [self._token(row, row.start + 1 + i) for i in range(row.num_tokens)]
            for index, row in enumerate(step.rows)
            if has_drafts(row)
        }
        bursts = bursts_of(step.rows, guessed)
        for index, burst in bursts.items():
            token_ids[index] = burst[-1]
        result = StepResult(
            token_ids, launch_ns=launch_ns, tokens_ns=self._device_free_ns, bursts=bursts or None
        )
        return SimulatedStep(self, result)

    def _token(self, row: ScheduledRow, position: int) -> int:
        """Make up a token from request and position alone, so that the batch does not matter."""
        return (row.request.request_id * 7919 + position * 104_729 + self._seed) % VOCAB_SIZE


class SimulatedStep(NamedTuple):
    """A simulated step in flight. `collect` advances the clock to the end of the step."""

    runner: SimulatedRunner
    result: StepResult

    def collect(self) -> StepResult:
        self.runner.advance_to(self.result.tokens_ns)
        return self.result
