"""`UnfinishedStep`: a step that an engine has scheduled and whose tokens it does not have yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from stepscope.engine.adapters.attached.tracked import TrackedRequest
from stepscope.engine.protocol.wire import Phase, RankTimes
from stepscope.engine.telemetry.batch_rows import RowFields

# An ordinary decode is (request, DECODE, start, None). Any other row is (request, None, start,
# all of its fields). The compiled row encoder expects this form.
Row: TypeAlias = tuple[TrackedRequest, Phase | None, int, RowFields | None]


_NO_ROWS = msgspec.Raw(b"\x90")


class Taken(NamedTuple):
    """Blocks that a request received. The first `num_hit` came from the prefix cache."""

    request: TrackedRequest
    blocks: list[int]
    num_hit: int
    group: int = 0


class Freed(NamedTuple):
    """A block that a request no longer holds, though the request may go on."""

    request: TrackedRequest | None  # None: it held the block so shortly that nobody noticed
    block: int
    is_cached: bool  # its content stays in the prefix cache


@dataclass(slots=True)
class UnfinishedStep:
    """A step that was scheduled and has not ended.

    Attributes:
        key: identifies the step. The engine's package sets and compares it.
        number: None if the step runs no request and only preempted requests.
        token_budget: None if the step had no token budget.
        admitted: admitted requests, each with its number of cached tokens.
        preempt_reason: why the requests in `preempted` were preempted, in words.
        drafted: requests with drafts, and how many the step checks.
        num_got: how many tokens each of those got, known when the step has ended.
        set_back: requests whose drafts an earlier step rejected after this step was scheduled, and
            how many: their rows here start that much earlier.
        freed: blocks that were freed before any of `taken` were taken.
        held: waiting requests that the engine holds back for a reason of their own, see `HeldRow`;
            None: the same as before.
        overtaken: waiting requests that came before one that this step admits for its priority.
        held_prefills, ranks: as in `StepRecord`.
        lost: requests preempted before the step ended. Their rows in this step are wasted.
    """

    key: Any
    number: int | None
    start_ns: int
    end_ns: int
    knobs_version: int
    token_budget: int | None
    num_seats: int
    launch_ns: int | None = None
    device_ns: int | None = None
    cuda_graph: str | None = None
    num_padded_tokens: int | None = None
    batch: msgspec.Raw = field(default_factory=lambda: _NO_ROWS)
    rows: list[Row] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    freed: list[Freed] = field(default_factory=list)
    preempted: list[TrackedRequest] = field(default_factory=list)
    preempt_reason: str = "out of KV blocks"
    admitted: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    drafted: dict[TrackedRequest, int] = field(default_factory=dict)
    num_got: dict[TrackedRequest, int] = field(default_factory=dict)
    set_back: dict[TrackedRequest, int] = field(default_factory=dict)
    held: dict[TrackedRequest, str] | None = None
    overtaken: list[TrackedRequest] = field(default_factory=list)
    lost: set[TrackedRequest] = field(default_factory=set)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] = field(default_factory=dict)
    held_prefills: bool = False
    ranks: list[RankTimes] | None = None

    def preempt(self, requests: Sequence[TrackedRequest]) -> None:
        """Note that this step preempted these requests and took their blocks."""
        for tracked in sorted(requests, key=lambda each: each.request_id):
            if not tracked.is_prefilling:  # its newest token has not been computed
                tracked.num_computed = tracked.engine_request.num_tokens - 1
            tracked.block_table = []
            tracked.num_loaded, tracked.is_loaded_early = 0, False
            tracked.is_prefilling = tracked.was_preempted = True
            self.preempted.append(tracked)

    def resume(self, tracked: TrackedRequest) -> None:
        """Note that a preempted request runs again."""
        tracked.num_known = tracked.engine_request.num_tokens
