"""`PlannedBlocks`: what a step did to the blocks that was scheduled before the last one had ended.

An observer sees steps one after another: what a step took, then what its end freed, then the
next step. Where a step is scheduled before the end of the one before it is known, things happen in
another order, and `PlannedBlocks` keeps them apart: a record says what would be so had the step
been scheduled after that end. Both orders lead to the same state, for scheduling ahead only takes
blocks (`StepPlan` preempts no request then) and the end of a step only frees some.
"""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import CACHED, EMPTY, KVCounts
from stepscope.engine.scheduling.block_pool import BlockState
from stepscope.engine.scheduling.kv_cache import KVCacheManager


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
        """There will be no record of it: the next record includes its moves."""
        kv.publish_again(self.changes, self.counts)

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
            state = BlockState(CACHED, 0)  # its request was admitted by this step
        else:
            state = freed  # taken for a token that is dropped
        if state == freed:
            del self.changes[block]
        else:
            self.changes[block] = state, freed
        return state

    def counted_with(self, now: KVCounts) -> KVCounts:
        """`now`, with what was looked up and evicted here."""
        own = self.counts
        return KVCounts(
            now.used,
            now.cached,
            now.empty,
            now.evicted + own.evicted,
            now.queried_tokens + own.queried_tokens,
            now.hit_tokens + own.hit_tokens,
        )

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
