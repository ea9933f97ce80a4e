"""What goes to and fro inside a step: between the scheduler, a runner and a KV receiver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.commands import KVTicket
from stepscope.engine.protocol.replies import PositionLogprobs
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request


class ScheduledRow(NamedTuple):
    """`num_tokens` tokens of one request, from position `start` on.

    A decode of several tokens is the request's newest one and the first of its `draft_token_ids`.
    Each of them is followed by a new token.
    """

    request: Request
    phase: Phase
    start: int
    num_tokens: int
    samples: bool  # the last of these tokens is followed by a new one


class InFlight(Protocol):
    """A step that was launched and not waited for."""

    is_whole: bool
    """Nothing had to be cut or left out of it: the next step may be launched upon it."""

    def collect(self) -> "StepResult":
        """Wait for it. To be called once, in the order in which steps were launched.

        Raises:
            Exception: it failed.
        """
        ...


@dataclass(slots=True, frozen=True)
class ScheduledStep:
    """The batch of one forward step, in the order it is laid out (sum of tokens <= budget).

    `num_padded_tokens` is what an engine with one rectangle a batch would compute besides (mode
    `static`); a runner that packs its rows has no use for it.

    `after` is the step before this one, if it is still in flight: a row that starts behind the last
    token of its request continues the token that the request gets in that step.

    `start_ns` is when its scheduling began, by the runner's clock.
    """

    step: int
    rows: list[ScheduledRow]
    num_padded_tokens: int = 0
    after: InFlight | None = None
    start_ns: int = 0


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a runner gives back.

    `token_ids` has one entry a row, None where the row does not sample; `logprobs` has one for
    each row whose request asks for them, by the row's index. Of a row with drafts, `bursts` has the
    tokens that it gives, as `acceptance.accepted` found them, and `token_ids` the last of them.
    `num_padded_tokens` is padding that
    the runner itself computed, for a fixed shape for example. `cuda_graph` is as in `StepRecord`.

    Times are of the runner's clock: the host began to launch the model, and it knew the tokens. Of
    a step launched while another ran, the first is before the other's tokens were known; the
    device did not begin then. `device_ns` is the time of the device alone, of this step alone;
    None where there is no separate device.

    Where the device had no memory for the step as a whole, `num_tokens_fit` is the size of the
    largest part that ran, and `unfit_rows` are those that could not be computed at all.
    """

    token_ids: list[int | None]
    launch_ns: int
    tokens_ns: int
    device_ns: int | None = None
    num_padded_tokens: int = 0
    logprobs: dict[int, PositionLogprobs] | None = None  # None: no request asks for them
    num_tokens_fit: int | None = None  # None: it did not have to be cut
    unfit_rows: tuple[int, ...] = ()
    bursts: dict[int, list[int]] | None = None  # None: no row had drafts
    cuda_graph: str | None = None


class Runner(Protocol):
    """Executes steps. It owns every tensor; block ids are all it knows of the KV cache."""

    def clock(self) -> int:
        """Now, in nanoseconds: `time.monotonic_ns`, or a virtual time."""
        ...

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run the model over `step.rows` and sample where a row asks for it."""
        ...

    def launch(self, step: ScheduledStep) -> InFlight:
        """Begin to `execute`, and wait for nothing.

        Steps run one after another: what one stores in the KV cache, the next one finds. Where a
        CPU runs them they have run when this returns: then overlap gains nothing, only delays what
        is known of a step by the run of the next (`EngineConfig.overlaps`).
        """
        ...


class KVReceiver(Protocol):
    """Brings keys and values that another engine has computed into our KV cache."""

    def check(self, ticket: KVTicket, num_tokens: int) -> None:
        """Raises ConfigError when what it stands for is not `num_tokens` of our model."""
        ...

    def load(self, ticket: KVTicket, blocks: Sequence[int], num_present: int) -> bool:
        """Copy into `blocks`, of which the first `num_present` have their content already.

        Returns:
            False: it is not there any more. The content of the other blocks is undefined then.
        """
        ...
