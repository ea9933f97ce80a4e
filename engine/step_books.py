"""`StepBooks`: what a record tells of the queues and the blocks around one step.

An observer is told of steps one after another: what a step took, then what its end freed, then the
next step. Where a step is scheduled before the end of the one before it is known, things happen in
another order, and `PlannedBlocks` keeps them apart: a record says what would be so had the step
been scheduled after that end. Both orders lead to the same state, for scheduling ahead only takes
blocks (`StepPlan` preempts nobody then) and the end of a step only frees some.
"""

from dataclasses import dataclass

from stepscope.engine.block_pool import BlockState
from stepscope.engine.config import Knobs
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.wire import CACHED, EMPTY, BlockMove, KVCounts


@dataclass(slots=True)
class PlannedBlocks:
    """What scheduling one step did to the blocks, taken out of the books of `kv` for later.

    Attributes:
        changes: block -> (before, after).
        counts: of what was looked up and evicted; its blocks by state are of no meaning.
    """

    changes: dict[int, tuple[BlockState, BlockState]]
    counts: KVCounts

    @classmethod
    def drain(cls, kv: KVCacheManager) -> "PlannedBlocks":
        counts = kv.counts()
        return cls(kv.drain_changes(), counts)

    def give_back(self, kv: KVCacheManager) -> None:
        """There will be no record of it: whatever is told next tells it."""
        kv.tell_again(self.changes, self.counts)

    def seen_before(self, block: int, freed: BlockState) -> BlockState:
        """The state of a block that was planned with here, and then freed by the step before.

        Returns:
            What it is after that step and before this one; from now on `changes` begins there.
        """
        before, planned = self.changes[block]
        ref_count = freed.ref_count - (planned.ref_count - before.ref_count)
        if ref_count > 0:
            state = BlockState(before.owner, ref_count)
        elif freed.ref_count:
            state = BlockState(CACHED, 0)  # whoever holds it now was admitted by this step
        else:
            state = freed  # taken for a token that nobody gets
        if state == freed:
            del self.changes[block]
        else:
            self.changes[block] = state, freed
        return state

    def counts_before(self, now: KVCounts) -> KVCounts:
        """The blocks by state without what is planned here."""
        used, cached, empty = now.used, now.cached, now.empty
        for before, after in self.changes.values():
            for state, change in ((before, 1), (after, -1)):
                if state.owner == CACHED:
                    cached += change
                elif state.owner == EMPTY:
                    empty += change
                else:
                    used += change
        return KVCounts(used, cached, empty, now.evicted, now.queried_tokens, now.hit_tokens)


@dataclass(slots=True)
class StepBooks:
    """The scheduler's side of a record.

    Made once a step is scheduled; `num_running` and the blocks are settled at its end.
    """

    knobs: Knobs  # with the budget that was in force
    token_limit: int | None
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padded_tokens: int
    num_running: int
    num_waiting: int
    waiting_reasons: dict[str, int]
    kv: KVCounts | None = None
    moves: list[BlockMove] | None = None
    planned: PlannedBlocks | None = None  # of this step, where the next was scheduled upon it

    @classmethod
    def open(cls, scheduler: Scheduler) -> "StepBooks":
        """To be called between `schedule` and whatever comes next."""
        return cls(
            scheduler.step_knobs,
            scheduler.token_limit,
            scheduler.num_prefill_tokens,
            scheduler.num_decode_tokens,
            scheduler.num_padded_tokens,
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.waiting_reasons(),
        )

    @classmethod
    def of(cls, scheduler: Scheduler) -> "StepBooks":
        """All of a step that has just ended and that nothing was scheduled upon."""
        books = cls.open(scheduler)
        books.settle(scheduler.kv, None)
        return books

    def settle(self, kv: KVCacheManager, ahead: PlannedBlocks | None) -> None:
        """The step has ended and freed what it freed.

        Args:
            ahead: what was planned upon it before that.
        """
        counts = kv.counts()
        if self.planned is None and ahead is None:
            self.kv, self.moves = counts, kv.drain_moves()
            return
        states = {}
        if self.planned is not None:
            own = self.planned.counts
            counts = KVCounts(
                counts.used,
                counts.cached,
                counts.empty,
                counts.evicted + own.evicted,
                counts.queried_tokens + own.queried_tokens,
                counts.hit_tokens + own.hit_tokens,
            )
            states = {block: after for block, (_, after) in self.planned.changes.items()}
        for block, (_, state) in kv.drain_changes().items():
            if ahead is not None and block in ahead.changes:
                state = ahead.seen_before(block, state)
            states[block] = state
        self.kv = counts if ahead is None else ahead.counts_before(counts)
        self.moves = [BlockMove(block, *state) for block, state in states.items()]
