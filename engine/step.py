"""What is handed over inside a step: from the scheduler to a runner, and back."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stepscope.engine.commands import PositionLogprobs
from stepscope.engine.request import Request
from stepscope.engine.wire import Phase


class ScheduledRow(NamedTuple):
    """`num_tokens` tokens of one request, from position `start` on."""

    request: Request
    phase: Phase
    start: int
    num_tokens: int
    samples: bool  # the last of these tokens is followed by a new one


@dataclass(slots=True, frozen=True)
class ScheduledStep:
    """The batch of one forward step, in the order it is laid out (sum of tokens <= budget).

    `num_padded_tokens` is what an engine with one rectangle a batch would compute besides (mode
    `static`); a runner that packs its rows has no use for it.
    """

    step: int
    rows: list[ScheduledRow]
    num_padded_tokens: int = 0


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a runner gives back.

    `token_ids` has one entry a row, None where the row does not sample; `logprobs` has one for
    each row whose request asks for them, by the row's index. Times are of the runner's clock;
    `device_ns` is None where there is no separate device. `num_padded_tokens` is padding that the
    runner itself computed, for a fixed shape for example.
    """

    token_ids: list[int | None]
    launch_ns: int
    tokens_ns: int
    device_ns: int | None = None
    num_padded_tokens: int = 0
    logprobs: dict[int, PositionLogprobs] | None = None  # None: nobody asks


class Runner(Protocol):
    """Executes steps. It owns every tensor; block ids are all it is told of the KV cache."""

    def clock(self) -> int:
        """Now, in nanoseconds: `time.monotonic_ns`, or a virtual time."""
        ...

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run the model over `step.rows` and sample where a row asks for it."""
        ...
