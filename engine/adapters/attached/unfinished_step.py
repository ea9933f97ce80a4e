"""`UnfinishedStep`: what an engine has scheduled, until it has the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from stepscope.engine.adapters.attached.tracked import TrackedRequest
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.telemetry.batch_rows import RowFields

# An ordinary decode is (request, DECODE, start, None); of any other row the phase is None here,
# and all of its fields come last. So the compiled row encoder takes them.
Row: TypeAlias = tuple[TrackedRequest, Phase | None, int, RowFields | None]

_NO_ROWS = msgspec.Raw(b"\x90")


class Taken(NamedTuple):
    """Blocks that a request got; the first `num_hit` of them by their content."""

    request: TrackedRequest
    blocks: list[int]
    num_hit: int


@dataclass(slots=True)
class UnfinishedStep:
    """A step that was scheduled and has not ended.

    Attributes:
        key: by which its engine's package finds it again.
        number: None: it runs nothing, and only took blocks from requests.
        token_budget: None: it had none.
        admitted: with their cached tokens.
        preempt_reason: why those in `preempted` were, in words.
        lost: requests that were preempted before the step ended: its rows of them are wasted.
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
    preempted: list[TrackedRequest] = field(default_factory=list)
    preempt_reason: str = "out of KV blocks"
    admitted: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    lost: set[TrackedRequest] = field(default_factory=set)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] = field(default_factory=dict)

    def preempt(self, requests: Sequence[TrackedRequest]) -> None:
        """These have lost their blocks."""
        for tracked in sorted(requests, key=lambda each: each.request_id):
            tracked.block_table = []
            tracked.is_prefilling = tracked.was_preempted = True
            self.preempted.append(tracked)

    def resume(self, tracked: TrackedRequest) -> None:
        """It runs again after a preemption, and computes what it had once more."""
        tracked.recompute_until = tracked.source.num_tokens
