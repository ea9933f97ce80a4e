"""`PlannedBlocks`: block changes of a step that was scheduled while the step before it still ran.

Records show steps one after another: first the blocks that a step takes, then those that are
freed when it ends, then the next step. With overlap, a step takes its blocks before the step in
front of it has ended and freed its own. `PlannedBlocks` keeps the early changes apart, so that they
are recorded as if the step had been scheduled after that end.

Both orders lead to the same state. Scheduling ahead only takes blocks (`StepPlan` preempts no
request then), and the end of a step only frees some.
"""

from dataclasses import dataclass

from stepscope.engine.protocol.wire import CACHED, EMPTY, KVCounts
from stepscope.engine.scheduling.block_pool import BlockState
from stepscope.engine.scheduling.kv_cache import KVCacheManager


@dataclass(slots=True)
class PlannedBlocks:
    """Block changes from scheduling one step, drained from the KV cache to be published later.

    Attributes:
        changes: block id -> (state before scheduling, state after it).
        counts: tokens looked up and hit, and blocks evicted, while scheduling. Ignore the numbers
            of blocks in each state.
    """

    changes: dict[int, tuple[BlockState, BlockState]]
    counts: KVCounts

    @classmethod
    def drain(cls, kv: KVCacheManager) -> "PlannedBlocks":
        counts = kv.counts()
        return cls(kv.drain_changes(), counts)

    def give_back(self, kv: KVCacheManager) -> None:
        """Return the changes to `kv` for the next record, because this step gets no record."""
        kv.publish_again(self.changes, self.counts)

    def seen_before(self, block: int, freed: BlockState) -> BlockState:
        """Correct `changes` for a block that the end of the previous step has just released.

        Args:
            freed: the block's state now, after both this step's scheduling and that release.

        Returns:
            The block's state after the release but before this step took blocks. From now on this
            is the state before scheduling in `changes`.
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
        return KVCounts(
            now.used,
            now.cached,
            now.empty,
            now.evicted + own.evicted,
            now.queried_tokens + own.queried_tokens,
            now.hit_tokens + own.hit_tokens,
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
        return KVCounts(used, cached, empty, now.evicted, now.queried_tokens, now.hit_tokens)
