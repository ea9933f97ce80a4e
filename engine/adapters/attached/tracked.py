"""`TrackedRequest`: a request of the other engine; `UnfinishedStep`: a step without its tokens.

A step's rows say which tokens of which request it computes. They are made when the step is
scheduled. When it ends, rows of lost requests are removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from stepscope.engine.protocol.wire import (
    DraftRow,
    Phase,
    RankTimes,
    RequestStatus,
    RequestView,
    RowFlag,
)
from stepscope.engine.telemetry import batch_rows
from stepscope.engine.telemetry.batch_rows import RowFields, keep_rows, with_positions
from stepscope.engine.telemetry.step_watcher import RunningRow

_DECODE, _PREFILL, _RECOMPUTE = int(Phase.DECODE), int(Phase.PREFILL), int(Phase.RECOMPUTE)
_LAST_CHUNK, _FIRST_TOKEN = int(RowFlag.LAST_CHUNK), int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)


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
        num_loaded: tokens whose keys and values come from elsewhere, as scheduled.
        is_loaded_early: whether they came before its first step.
        was_overtaken: whether one that came later was scheduled before it, for its priority.
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

# Our own engine's encoder. It reads the slots of the type passed to it, and the first fields of a
# row.
_encode = cast(
    Callable[[list[Row], Phase, type[TrackedRequest], Callable[[Row], RowFields | None]], bytes],
    cast(Any, batch_rows.compiled or batch_rows.encode_in_python),
)
_fields = itemgetter(3)


def num_tokens_of(row: Row) -> int:
    return 1 if row[3] is None else row[3][3]


def gives_token(row: Row) -> bool:
    """Whether this step samples a token for the request."""
    return row[3] is None or bool(row[3][6] & _LAST_CHUNK)


def gives_first_token(row: Row) -> bool:
    return row[3] is not None and bool(row[3][6] & _FIRST_TOKEN)


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

    def encode(self) -> None:
        """Encode `rows` into `batch`, before a later step changes the block tables."""
        self.batch = msgspec.Raw(_encode(self.rows, Phase.DECODE, TrackedRequest, _fields))

    def add_row(
        self,
        tracked: TrackedRequest,
        start: int,
        num_tokens: int,
        num_blocks: int,
        num_drafted: int = 0,
    ) -> None:
        """Add a row that is not an ordinary decode (one token, no drafts).

        Updates the prefill state of `tracked`. If this step admits it, `admitted` must say so.
        """
        fields = self._fields_of(tracked, start, num_tokens, num_blocks)
        if num_drafted:
            self.drafted[tracked] = num_drafted
        if fields[1] != _DECODE:
            self.num_prefill_tokens += num_tokens - num_drafted
        self.rows.append((tracked, None, start, fields))

    def _fields_of(
        self, tracked: TrackedRequest, start: int, num_tokens: int, num_blocks: int
    ) -> RowFields:
        if not tracked.is_prefilling:  # with draft tokens
            return tracked.request_id, _DECODE, start, num_tokens, 0, num_blocks, _LAST_CHUNK
        flags = 0
        num_prompt = tracked.engine_request.num_prompt_tokens
        known = max(num_prompt, tracked.num_known)
        if start + num_tokens >= known:
            tracked.is_prefilling = False
            flags = _LAST_CHUNK if tracked.max_tokens else 0
            if flags and not tracked.has_first_token:
                tracked.has_first_token = True
                flags |= _FIRST_TOKEN
        num_cached = next((count for each, count in self.admitted if each is tracked), None)
        if num_cached is not None and tracked.was_preempted:
            flags |= _RESUMED
        if start < tracked.num_computed:
            phase = _RECOMPUTE
        elif start >= num_prompt and start + 1 == known:
            phase = _DECODE  # resumed, and all but its newest token was still cached
        else:
            phase = _PREFILL
        tracked.num_computed = max(tracked.num_computed, start + num_tokens)
        return tracked.request_id, phase, start, num_tokens, num_cached or 0, num_blocks, flags

    def drop_lost(self, ended_now: set[TrackedRequest]) -> int:
        """Remove the rows of requests that ended or were preempted before this step ended.

        Rows of `ended_now`, which ended with this step's tokens, stay. Returns the number of tokens
        in the removed rows: the step computed them in vain.
        """
        kept, num_wasted = [], 0
        for i, row in enumerate(self.rows):
            tracked = row[0]
            if tracked not in self.lost and (not tracked.ended or tracked in ended_now):
                kept.append(i)
                continue
            num_wasted += num_tokens_of(row)
            if row[3] is not None and row[3][1] != _DECODE:
                self.num_prefill_tokens -= num_tokens_of(row) - self.drafted.get(tracked, 0)
            if gives_first_token(row):
                tracked.has_first_token = False
        if num_wasted:
            self.rows = [self.rows[i] for i in kept]
            self.batch = keep_rows(self.batch, kept)
        return num_wasted

    def check_drafts(self) -> list[DraftRow] | None:
        """Set the rows of this ended step to the tokens that requests got, and where they start.

        Returns which drafts were accepted; None if the step checked none.
        """
        if not self.drafted and not self.set_back:
            return None
        checked, found = {}, []
        for i, row in enumerate(self.rows):
            tracked, _, start, _ = row
            num_drafted, num_back = self.drafted.get(tracked, 0), self.set_back.get(tracked, 0)
            num_accepted = 0
            if num_drafted:
                num_accepted = self.num_got[tracked] - 1
                found.append(DraftRow(tracked.request_id, num_drafted, num_accepted))
            if num_drafted or num_back:
                checked[i] = start - num_back, num_tokens_of(row) - num_drafted + num_accepted
        self.batch = with_positions(self.batch, checked)
        return found or None

    def running_rows(self) -> list[RunningRow]:
        """Return the rows in the short form that is published while the step still runs."""
        found = []
        for row in self.rows:
            tracked, _, start, fields = row
            phase = _DECODE if fields is None else fields[1]
            found.append(RunningRow(tracked.request_id, phase, start, num_tokens_of(row)))
        return found
