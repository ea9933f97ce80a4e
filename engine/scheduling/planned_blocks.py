"""`PlannedBlocks`: block changes of a step that was scheduled before the last one had ended.

An observer sees steps one after another: the blocks that a step takes, then those that its end
frees, then the next step. If a step is scheduled before the one before it has ended, things happen
in another order. `PlannedBlocks` keeps the changes apart, so that a record looks as if the step had
been scheduled after that end. Both orders lead to the same state, because scheduling ahead only
takes blocks (`StepPlan` then preempts no request) and the end of a step only frees some.
"""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import CACHED, EMPTY, KVCounts
from stepscope.engine.scheduling.block_pool import BlockState
from stepscope.engine.scheduling.kv_cache import KVCacheManager


@dataclass(slots=True)
class PlannedBlocks:
    """Block changes from the scheduling of one step, drained from `kv` to be published later.

    Attributes:
        changes: block id -> (state before, state after).
        counts: what was looked up, hit and evicted; ignore its blocks by state.
    """

    changes: dict[int, tuple[BlockState, BlockState]]
    counts: KVCounts

    @classmethod
    def drain(cls, kv: KVCacheManager) -> "PlannedBlocks":
        counts = kv.counts()
        return cls(kv.drain_changes(), counts)

    def give_back(self, kv: KVCacheManager) -> None:
        """Return the changes to `kv` for the next record; this step gets no record."""
        kv.publish_again(self.changes, self.counts)

    def seen_before(self, block: int, freed: BlockState) -> BlockState:
        """Account for a block in `changes` that the end of the step before has just released.

        Args:
            freed: its state now, after both.

        Returns:
            Its state after that step but before this one. `changes` begins there from now on.
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
        """`now`, plus what was looked up, hit and evicted here."""
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
        """`now`, with the blocks by state as they were before the changes planned here."""
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
