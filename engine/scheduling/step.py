"""Types that the scheduler, a runner and a KV receiver exchange within a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.commands import KVTicket
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import PositionLogprobs
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request


class ScheduledRow(NamedTuple):
    """What a step computes for one request: `num_tokens` tokens from position `start` on.

    A decode of several tokens consists of the request's newest token and its `draft_token_ids`; a
    token is sampled after each of them.
    """

    request: Request
    phase: Phase
    start: int
    num_tokens: int
    samples: bool  # whether a new token is sampled after the last of these tokens


class DeviceMemoryError(Exception):
    """The device has no memory for a step; it may have for a smaller one."""


class DeviceLostError(ConfigError):
    """The device failed, and runs no step any more."""


class InFlight(Protocol):
    """A step that was launched and whose result was not yet collected."""

    def collect(self) -> "StepResult":
        """Wait for the step and return its result. Call it once, in the order of the launches."""


@dataclass(slots=True, frozen=True)
class ScheduledStep:
    """The batch of one forward step.

    Attributes:
        rows: in the order in which they are laid out. Their tokens fit into the budget.
        num_padded_tokens: the padding that an engine with rectangular batches would compute in
            addition (mode `static`); a runner that packs its rows ignores it.
        after: the step before this one, if it is still in flight. A row that starts after the last
            known token of its request begins with the token that the request gets in that step.
        start_ns: when scheduling of this step began, by the runner's clock.
    """

    step: int
    rows: list[ScheduledRow]
    num_padded_tokens: int = 0
    after: InFlight | None = None
    start_ns: int = 0


@dataclass(slots=True, frozen=True)
class StepResult:
    """The result of a step, from the runner.

    Times are by the runner's clock. If another step still ran when this one was launched,
    `launch_ns` is before the other's tokens were known and before the device began this step.

    Attributes:
        token_ids: one entry a row; None if the row does not sample. For a row with drafts, the last
            of its `bursts`.
        launch_ns: when the host began to launch the model.
        tokens_ns: when the host knew the tokens.
        device_ns: how long the device was busy with this step alone; None if there is no separate
            device.
        num_padded_tokens: padding that the runner itself computed, for example for a fixed shape.
        logprobs: by row index, for each row whose request asks for them.
        unsound_rows: the indices of rows without a token, because their logits were not finite.
        bursts: by row index, the tokens that `acceptance.accepted` returned for a row with drafts.
        cuda_graph: as in `StepRecord`.
    """

    token_ids: list[int | None]
    launch_ns: int
    tokens_ns: int
    device_ns: int | None = None
    num_padded_tokens: int = 0
    logprobs: dict[int, PositionLogprobs] | None = None  # None: no request asks for them
    unsound_rows: tuple[int, ...] = ()
    bursts: dict[int, list[int]] | None = None  # None: no row had drafts
    cuda_graph: str | None = None


class Runner(Protocol):
    """Executes steps. It owns all tensors; of the KV cache's state it gets only block ids.

    A step that the device has no memory for raises DeviceMemoryError. One that is launched when the
    device has failed raises DeviceLostError.
    """

    def clock(self) -> int:
        """Return the time in nanoseconds: `time.monotonic_ns`, or virtual time."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run the model over `step.rows`, and sample for the rows with `samples`."""

    def launch(self, step: ScheduledStep) -> InFlight:
        """Start to execute a step, without waiting for it.

        Steps run one after another, so each sees what the step before it stored in the KV cache. On
        a CPU, the step has already run when this returns. Overlap is useless there: it would only
        delay the result of a step by the run of the next (`EngineConfig.overlaps`).
        """


class KVReceiver(Protocol):
    """Copies keys and values that another engine has computed into our KV cache."""

    def check(self, ticket: KVTicket, num_tokens: int) -> None:
        """Raise ConfigError if the ticket does not stand for `num_tokens` tokens of our model."""

    def load(self, ticket: KVTicket, blocks: Sequence[int], num_present: int) -> bool:
        """Copy the keys and values of a ticket into `blocks`.

        Leaves out the first `num_present` blocks, which already have theirs from the prefix cache.

        Returns:
            False if the other engine no longer has them; the blocks then have undefined content.
        """
