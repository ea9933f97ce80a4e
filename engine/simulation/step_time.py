"""`StepTimeModel`: how long a step takes, by what is in it.

A step is known to a model by its `StepShape`, which has no requests and no times: it can be made
from a `ScheduledStep`, from a record of a real step, or by hand.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.step import ScheduledStep

_DECODE = int(Phase.DECODE)


class StepShape(NamedTuple):
    """What a step computes. A row is a prefill or a decode, as the scheduler counts it."""

    num_rows: int
    num_decodes: int  # rows that decode, one token each
    num_prefill_tokens: int  # computed in this step, recomputed ones and padding included
    num_prefill_pairs: int  # attention of prefills: a query token with each key token it sees
    num_context_tokens: int  # key tokens that decodes see, their own included
    num_prefill_context: int = 0  # key tokens that prefills see, each counted once for its row

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes

    @property
    def num_prefills(self) -> int:
        return self.num_rows - self.num_decodes


class StepTime(NamedTuple):
    """The cycle of a step is `device_s + host_s`, or the longer of them where steps overlap."""

    device_s: float
    host_s: float  # between two steps: schedule, prepare, take the tokens in
    spread: float = 0.0  # standard deviation of the logarithm of the device's time
    is_extrapolated: bool = False  # the model has seen nothing like this step

    @property
    def cycle_s(self) -> float:
        return self.device_s + self.host_s


class StepTimeModel(Protocol):
    """The same shape always gets the same answer: chance is the caller's, by the spread."""

    def step_time(self, shape: StepShape) -> StepTime: ...


def shape_of(step: ScheduledStep) -> StepShape:
    """The shape of a step that was scheduled. Padding counts as prefill tokens."""
    return shape_of_rows([row[1:4] for row in step.rows], step.num_padded_tokens)


def shape_of_rows(rows: Sequence[tuple[int, int, int]], num_padded_tokens: int = 0) -> StepShape:
    """Of rows by phase, start and number of tokens."""
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


class CostModel(Struct, frozen=True, kw_only=True):
    """A floor, plus so much for each token and for each pair of a token and one it sees."""

    floor_ms: float = 8.0
    token_us: float = 40.0
    context_ns: float = 20.0
    host_ms: float = 0.2

    def step_time(self, shape: StepShape) -> StepTime:
        # Of its own key a token counts half, so that a chunk of n alone counts n * n / 2.
        pairs = shape.num_prefill_pairs + shape.num_context_tokens - shape.num_tokens / 2
        ns = self.floor_ms * 1e6 + shape.num_tokens * self.token_us * 1e3 + pairs * self.context_ns
        return StepTime(ns / 1e9, self.host_ms / 1e3)
