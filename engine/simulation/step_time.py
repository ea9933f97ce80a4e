"""`StepTimeModel`: predicts how long a step takes.

Its input is a `StepShape`, which has no requests and no times: it can be made from a
`ScheduledStep`, from the record of a real step, or by hand.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.step import ScheduledStep

_DECODE = int(Phase.DECODE)


class StepShape(NamedTuple):
    """The amount of work in a step. Each row is a prefill or a decode, as in the scheduler."""

    num_rows: int
    num_decodes: int  # rows that decode, counted as one token each
    num_prefill_tokens: int  # with recomputed tokens and padding
    num_prefill_pairs: int  # pairs of a query token and a key token it attends to, in prefills
    num_context_tokens: int  # key tokens that decodes attend to, with their own
    num_prefill_context: int = 0  # key tokens that prefills attend to, counted once for each row

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes

    @property
    def num_prefills(self) -> int:
        return self.num_rows - self.num_decodes


class StepTime(NamedTuple):
    """Time of a step. Its cycle is `device_s + host_s`; with overlap, the longer of the two."""

    device_s: float
    host_s: float  # between two steps: scheduling, preparing inputs, updating requests
    spread: float = 0.0  # standard deviation of the logarithm of `device_s`
    is_extrapolated: bool = False  # the step is far outside of the model's data

    @property
    def cycle_s(self) -> float:
        return self.device_s + self.host_s


class StepTimeModel(Protocol):
    """Predicts the time of a step, always the same for a `StepShape`."""

    def step_time(self, shape: StepShape) -> StepTime: ...


def shape_of(step: ScheduledStep) -> StepShape:
    """Return the `StepShape` of a scheduled step. Padding counts as prefill tokens."""
    return shape_of_rows([row[1:4] for row in step.rows], step.num_padded_tokens)


def shape_of_rows(rows: Sequence[tuple[int, int, int]], num_padded_tokens: int = 0) -> StepShape:
    """Return the `StepShape` of a step from its rows: (phase, start, number of tokens) each."""
    num_decodes = num_pairs = num_context = num_prefill_context = 0
    num_prefill_tokens = num_padded_tokens
    for phase, start, num_tokens in rows:
        if phase == _DECODE:
            num_decodes += 1
            num_context += start + 1
        else:
            num_prefill_tokens += num_tokens
            num_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
            num_prefill_context += start + num_tokens
    return StepShape(
        len(rows), num_decodes, num_prefill_tokens, num_pairs, num_context, num_prefill_context
    )
