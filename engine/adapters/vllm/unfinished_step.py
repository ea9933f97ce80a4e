"""`UnfinishedStep`: what `schedule()` decided, until `update_from_output` ends the step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.engine.adapters.vllm.shapes import SchedulerOutput
from stepscope.engine.adapters.vllm.tracked import TrackedRequest
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
    """A step that vLLM scheduled and has not finished.

    Attributes:
        number: None: it runs nothing, and only took blocks from requests.
        admitted: with their cached tokens.
    """

    out: SchedulerOutput
    number: int | None
    start_ns: int
    end_ns: int
    knobs_version: int
    token_budget: int
    num_seats: int
    batch: msgspec.Raw = field(default_factory=lambda: _NO_ROWS)
    rows: list[Row] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    preempted: list[TrackedRequest] = field(default_factory=list)
    admitted: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] = field(default_factory=dict)

    def note_preempted(self, table: Mapping[str, TrackedRequest], names: Collection[str]) -> None:
        """These requests have lost their blocks."""
        found = [table[name] for name in names if name in table]
        for tracked in sorted(found, key=lambda each: each.request_id):
            tracked.block_table = []
            tracked.is_prefilling = True
            self.preempted.append(tracked)

    def note_blocks(self, table: Mapping[str, TrackedRequest], block_size: int) -> None:
        """Note the blocks that requests got, and the admitted requests."""
        out = self.out
        for new in out.scheduled_new_reqs:
            self._admit(table[new.req_id], new.block_ids, new.num_computed_tokens, block_size)
        again = out.scheduled_cached_reqs
        for i, block_ids in enumerate(again.new_block_ids):
            if block_ids is None:
                continue
            name = again.req_ids[i]
            tracked = table[name]
            if name in again.resumed_req_ids:
                tracked.was_preempted = True
                tracked.recompute_until = tracked.vllm.num_tokens
                self._admit(tracked, block_ids, again.num_computed_tokens[i], block_size)
            else:
                blocks = _own_ids(block_ids)
                tracked.block_table.extend(blocks)
                self.taken.append(Taken(tracked, blocks, 0))

    def _admit(
        self,
        tracked: TrackedRequest,
        block_ids: Collection[Collection[int]],
        num_cached: int,
        block_size: int,
    ) -> None:
        blocks = _own_ids(block_ids)
        tracked.block_table = blocks.copy()
        self.taken.append(Taken(tracked, blocks, num_cached // block_size))
        self.admitted.append((tracked, num_cached))


def _own_ids(block_ids: Collection[Collection[int]]) -> list[int]:
    """Our ids of the blocks of all KV groups, without vLLM's null block."""
    return [block - 1 for group in block_ids for block in group if block]
