"""`StepDraft`: the unfinished record of a step, from its scheduling until it is published.

The scheduler's decisions are recorded at once, while they are in the processor's caches. When the
step ends, its times and the blocks that it freed are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import field

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import CACHED, EMPTY, KVCounts
from stepscope.engine.scheduling.block_pool import BlockState
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.engine.telemetry.batch_rows import keep_rows, with_positions


@dataclass(slots=True)
class PlannedBlocks:
    """Block changes from scheduling one step while the step before it runs, to be published later.

    Records show steps one after another: first the blocks that a step takes, then those that are
    freed when it ends, then the next step. So what a step takes early is kept apart, and recorded
    as if it had been scheduled after that end. Both orders lead to the same state: scheduling ahead
    only takes blocks (`StepPlan` preempts no request then), and the end of a step only frees some.

    Attributes:
        changes: block id -> (state before scheduling, state after it).
        counts: tokens looked up and hit, and blocks evicted, while scheduling. Ignore the numbers
            of blocks in each state.
    """

    changes: dict[int, tuple[BlockState, BlockState]]
    counts: KVCounts

    def seen_before(self, block: int, freed: BlockState) -> BlockState:
        """Correct `changes` for a block that the end of the previous step has just released.

        `freed`: the block's state now, after both this step's scheduling and that release. Returns
        the state in between, which from now on is that before scheduling in `changes`.
        """
        before, planned = self.changes[block]
        ref_count = freed.ref_count - (planned.ref_count - before.ref_count)
        if ref_count > 0:
            state = BlockState(before.owner, ref_count)
        elif freed.ref_count:
            state = BlockState(CACHED, 0)  # a request that this step admitted still holds it
        else:
            state = freed  # this step took it for a request that has ended
        if state == freed:
            del self.changes[block]
        else:
            self.changes[block] = state, freed
        return state

    def counted_with(self, now: KVCounts) -> KVCounts:
        """Return `now`, with the lookups, hits and evictions from scheduling this step added."""
        own = self.counts
        return msgspec.structs.replace(
            now,
            evicted=now.evicted + own.evicted,
            queried_tokens=now.queried_tokens + own.queried_tokens,
            hit_tokens=now.hit_tokens + own.hit_tokens,
        )

    def counts_before(self, now: KVCounts) -> KVCounts:
        """Return `now`, with the blocks in each state as before the changes planned here."""
        used, cached, empty = now.used, now.cached, now.empty
        for before, after in self.changes.values():
            for state, change in ((before, 1), (after, -1)):
                if state.owner == CACHED:
                    cached += change
                elif state.owner == EMPTY:
                    empty += change
                else:
                    used += change
        return msgspec.structs.replace(now, used=used, cached=cached, empty=empty)


class StepDraft(wire.StepRecord, frozen=False, kw_only=True, tag="StepRecord"):  # type: ignore[misc] # the record is frozen
    """A record whose fields that are declared here can still be changed. Encoded as a record."""

    schedule_start_ns: int
    schedule_end_ns: int
    launch_ns: int | None = None
    tokens_ns: int = -1  # set when the step ends
    device_ns: int | None = None
    num_prefill_tokens: int
    num_decode_tokens: int
    batch: msgspec.Raw  # type: ignore[assignment]
    kv: wire.KVCounts | None = None
    moves: list[wire.BlockMove] | msgspec.Raw = field(default_factory=list)  # type: ignore[assignment]
    num_running: int
    num_waiting: int
    events: list[wire.RequestEvent] = field(default_factory=list)
    num_dropped: int = 0
    token_ids: list[int | None] | None = None
    texts: list[str | None] | None = None
    hidden_ns: int | None = None
    num_wasted_tokens: int | None = None
    drafts: list[wire.DraftRow] | None = None
    cuda_graph: str | None = None
    num_graph_padding: int | None = None

    @classmethod
    def open(
        cls,
        step: int,
        schedule_ns: tuple[int, int],
        batch: msgspec.Raw,
        scheduler: Scheduler,
        knobs_version: int,
    ) -> "StepDraft":
        """Begin the record of a step. Call it right after `schedule`."""
        knobs, num_waiting = scheduler.step_knobs, len(scheduler.waiting)
        return cls(
            step=step,
            schedule_start_ns=schedule_ns[0],
            schedule_end_ns=schedule_ns[1],
            knobs_version=knobs_version,
            token_budget=knobs.max_num_batched_tokens,
            max_num_seqs=knobs.max_num_seqs,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_padded_tokens=scheduler.num_padded_tokens,
            batch=batch,
            num_running=len(scheduler.running),
            num_waiting=num_waiting,
            waiting_reasons=scheduler.waiting_reasons() if num_waiting else {},
            token_limit=scheduler.token_limit,
            held=[wire.HeldRow(each.request_id, "priority") for each in scheduler.overtaken_now]
            or None,
            held_prefills=scheduler.has_held_prefills,
        )

    def drop_rows(self, kept: list[int], num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.num_prefill_tokens -= num_prefill_tokens
        self.num_decode_tokens -= num_decode_tokens
        self.batch = keep_rows(self.batch, kept)

    def check_drafts(
        self, rows: Sequence[ScheduledRow], bursts: Mapping[int, list[int]], *, with_tokens: bool
    ) -> None:
        """Record the accepted drafts; rows get the counts of their `bursts` (tokens, by index)."""
        self.batch = with_positions(
            self.batch, {index: (rows[index].start, len(burst)) for index, burst in bursts.items()}
        )
        self.drafts = [
            wire.DraftRow(
                rows[index].request.request_id,
                rows[index].num_tokens - 1,
                len(burst) - 1,
                burst[:-1] if with_tokens else None,
            )
            for index, burst in bursts.items()
        ]

    def end(self, result: StepResult, kv: KVCacheManager | None) -> None:
        """Record the end of the step, after `Scheduler.update` has freed the finished requests.

        `kv`: None if another step was scheduled meanwhile; `settle_between` then follows.
        """
        self.launch_ns = result.launch_ns
        self.tokens_ns = result.tokens_ns
        self.device_ns = result.device_ns
        self.cuda_graph = result.cuda_graph
        if result.cuda_graph not in (None, "none"):
            self.num_graph_padding = result.num_padded_tokens
        if kv is not None:
            self.kv, moves = kv.drain()
            if moves is not None:
                self.moves = moves

    def hide(self, launched_ns: int, not_before_ns: int) -> None:
        """Record that the step was prepared while the step before it ran, so delaying no request.

        `not_before_ns`: when the tokens of the step before it were known; earlier times of this
        step are moved to that instant.
        """
        self.hidden_ns = launched_ns - self.schedule_start_ns
        self.schedule_start_ns = max(self.schedule_start_ns, not_before_ns)
        self.schedule_end_ns = max(self.schedule_end_ns, not_before_ns)
        self.launch_ns = max(self.launch_ns or 0, not_before_ns)

    def settle_between(
        self, kv: KVCacheManager, own: PlannedBlocks | None, ahead: PlannedBlocks | None
    ) -> None:
        """Record the block changes of an ended step, with overlap.

        `own`: those from scheduling this step; None if they were not drained then. `ahead`: those
        from scheduling the next step before this one ended; None if it was not.
        """
        counts = kv.counts()
        states = {}
        if own is not None:
            counts = own.counted_with(counts)
            states = {block: after for block, (_, after) in own.changes.items()}
        for block, (_, state) in kv.drain_changes().items():
            if ahead is not None and block in ahead.changes:
                state = ahead.seen_before(block, state)
            states[block] = state
        self.kv = counts if ahead is None else ahead.counts_before(counts)
        self.moves = [wire.BlockMove(block, *state) for block, state in states.items()]
