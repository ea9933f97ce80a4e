"""`TrackedRequest`: a request of the other engine; `UnfinishedStep`: a step without its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from stepscope.engine.protocol.wire import Phase, RankTimes, RequestStatus, RequestView
from stepscope.engine.telemetry.batch_rows import RowFields


class EngineRequest(Protocol):
    """A request as its engine reports it. The engine counts tokens as computed once scheduled."""

    @property
    def request_id(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The two states of one request: as scheduled by its engine, and as published.

    They differ while steps are in flight. The compiled row encoder reads the slots `request_id`
    and `block_table`.

    Attributes:
        request_id: our id. The engine's id is published as the client's id.
        max_tokens: tokens that the request may put out at most; 0 if it only reads its prompt.
        block_table: a zero for each block that the request holds as scheduled.
        is_prefilling: whether part of the prompt is not scheduled yet.
        num_known: tokens that it had when it was resumed last; all are computed before it decodes.
        num_computed: tokens that were computed once, of a request that prefills or was preempted.
        num_blocks, status, num_preemptions, num_cached: as published.
        held, held_blocks: why the engine holds it back while it waits, and the blocks that it has
            meanwhile, as published in `HeldRow`.
        elsewhere: as in `Arrived`.
        num_loaded: tokens whose keys and values come from elsewhere, as scheduled.
        is_loaded_early: whether they came before its first step.
        was_overtaken: whether one that came later was scheduled before it, for its priority.
        ended: whether the engine has ended it.
    """

    request_id: int
    engine_request: EngineRequest
    arrival_ns: int
    max_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_blocks: int = 0
    status: RequestStatus = "waiting"
    is_prefilling: bool = True
    was_preempted: bool = False
    has_first_token: bool = False
    held: str = ""
    held_blocks: int = 0
    elsewhere: str | None = None
    num_loaded: int = 0
    is_loaded_early: bool = False
    was_overtaken: bool = False
    ended: bool = False
    num_known: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    first_ns: int | None = None
    last_ns: int | None = None

    def view(self, num_in_flight: int) -> RequestView:
        """Return the published state; `num_in_flight`: tokens in steps that are not published."""
        request = self.engine_request
        return RequestView(
            request_id=self.request_id,
            client_id=request.request_id,
            status=self.status,
            arrival_ns=self.arrival_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=self.max_tokens,
            priority=request.priority,
            num_computed_tokens=max(0, request.num_computed_tokens - num_in_flight),
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=self.num_cached,
            num_blocks=self.num_blocks,
            num_preemptions=self.num_preemptions,
            first_token_ns=self.first_ns,
            last_token_ns=self.last_ns,
            held=self.held,
            elsewhere=self.elsewhere,
        )


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
        number, knobs_version: from the recorder. No number: it only preempted requests.
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
    start_ns: int
    end_ns: int
    token_budget: int | None
    num_seats: int
    number: int | None = None
    knobs_version: int = 0
    launch_ns: int | None = None
    device_ns: int | None = None
    cuda_graph: str | None = None
    num_graph_padding: int | None = None
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
