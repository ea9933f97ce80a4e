"""`Settlement`: applies the effects of steps on requests and blocks, in publication order.

While two steps are in flight, the engine's own state is ahead of the published state. So the
effects of a step are applied to the published state only when that step ends.
"""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.adapters.attached.tracked import Freed, Row, TrackedRequest, UnfinishedStep
from stepscope.engine.protocol.wire import (
    Admitted,
    BlockMove,
    BlockRun,
    GroupCounts,
    KVCounts,
    Preempted,
    PrefixMisses,
    RequestEvent,
    Totals,
)


class BlockGroups:
    """The group of each KV block as published, and the counts of each group; see `KVGroup`.

    Attributes:
        of_block: the group of the latest holder, one byte for each block.
        used, cached: number of blocks of each group.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.of_block = bytearray(num_blocks)
        self.used, self.cached = [0] * num_groups, [0] * num_groups

    def counts(self) -> list[GroupCounts]:
        return list(map(GroupCounts, self.used, self.cached))

    def of_moves(self, moves: Sequence[BlockMove]) -> bytes:
        """Return the group of each moved block, one byte each."""
        return bytes([self.of_block[move.block_id] for move in moves])


class PublishedPool(Protocol):
    """The published state of the KV pool: which requests hold each block.

    Attributes:
        groups: None if all blocks are of one group.
    """

    groups: BlockGroups | None

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None:
        """Add request `owner` as a holder of `blocks`.

        Args:
            num_hit: number of blocks, from the first on, that came from the prefix cache.
            group: that of the blocks; 0 without `groups`.
        """

    def free(self, owner: int | None, block: int, *, is_cached: bool) -> None:
        """Remove request `owner` as a holder of a block, if it is one.

        Args:
            owner: None: one that is not known as a holder.
            is_cached: whether the block's content stays in the prefix cache.
        """

    def drain(self) -> list[BlockMove]:
        """Update the published state.

        Returns the new state of each block that changed since the last call.
        """

    def counts(self, num_queried: int = 0, num_hit: int = 0) -> KVCounts:
        """Return the numbers of used, cached and empty blocks as of the last `drain`.

        Also returns the evictions since the last call.

        Args:
            num_queried, num_hit: prompt tokens that were looked up in the prefix cache, and those
                found in it, to be returned with them.
        """

    def runs(self) -> list[BlockRun] | None:
        """Return the state of all blocks as of the last `drain`, as runs of equal blocks.

        None if the engine only reports numbers of blocks.
        """


class Judged(Protocol):
    """Says why prompts missed the prefix cache; see `JudgedBlocks` of vLLM's adapter."""

    def admitted(self, tracked: TrackedRequest, num_cached: int) -> PrefixMisses | None: ...
    def took(self, tracked: TrackedRequest, blocks: Sequence[int], num_hit: int) -> None: ...
    def computed(self, tracked: TrackedRequest, row: Row) -> None: ...
    def released(self, tracked: TrackedRequest) -> None: ...


class Settlement:
    """Applies the effects of ended steps. Use it only while the attachment's notes are held.

    Args:
        pool: the KV pool as published. None if the engine does not report its blocks.
        caches_prefixes: whether the engine looks prompts up in a prefix cache.
        judged: None if nobody wants to know why prompts miss; never without a pool.
    """

    def __init__(
        self, pool: PublishedPool | None, caches_prefixes: bool, judged: Judged | None = None
    ) -> None:
        self._pool = pool
        self._judged = judged
        self._caches = caches_prefixes
        self._to_release: list[TrackedRequest] = []
        self._to_free: list[Freed] = []
        self._num_queried = self._num_hit = 0  # prompt tokens; since the last `drain`

    def settle(self, step: UnfinishedStep, ended_now: set[TrackedRequest]) -> list[RequestEvent]:
        """Apply the effects of a step that is about to be published. Returns its request events.

        Args:
            ended_now: requests that ended with this step's tokens. The effects on requests that
                ended earlier are skipped.
        """
        events: list[RequestEvent] = []
        pool, judged = self._pool, self._judged
        misses: dict[TrackedRequest, PrefixMisses | None] = {}
        rows: dict[TrackedRequest, Row] = {}
        if judged is not None and (step.num_prefill_tokens or step.admitted):
            rows = {row[0]: row for row in step.rows if not row[0].ended or row[0] in ended_now}
        elif not (step.preempted or step.taken or step.admitted or step.freed):
            return events
        num_cached_of = dict(step.admitted)
        for tracked in step.preempted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.num_preemptions += 1
            tracked.status = "preempted"
            events.append(Preempted(tracked.request_id, tracked.num_blocks, step.preempt_reason))
            if judged is not None:
                judged.released(tracked)
            tracked.num_blocks = 0
        self._free(step.freed)
        if judged is not None and rows:
            receiving = {each.request for each in step.taken}
            for tracked, row in rows.items():
                if tracked not in receiving:
                    judged.computed(tracked, row)
        for tracked, blocks, num_hit, group in step.taken:
            if tracked.ended and tracked not in ended_now:
                if judged is not None:
                    judged.took(tracked, blocks, num_hit)
                continue
            if judged is not None:
                if tracked in num_cached_of:
                    misses[tracked] = judged.admitted(tracked, num_cached_of[tracked])
                judged.took(tracked, blocks, num_hit)
            if pool is not None:
                pool.take(tracked.request_id, blocks, num_hit, group)
            tracked.num_blocks += len(blocks)
            if judged is not None and tracked in rows:
                judged.computed(tracked, rows[tracked])
        for tracked, num_cached in step.admitted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.status = "running"
            tracked.held, tracked.held_blocks = "", 0
            if not tracked.num_preemptions:
                tracked.num_cached = num_cached
                num_prompt = tracked.engine_request.num_prompt_tokens
                if self._caches:
                    self._num_queried += num_prompt
                    self._num_hit += num_cached
            is_early, told = tracked.is_loaded_early, misses.get(tracked)
            num_loaded = tracked.num_loaded
            events.append(Admitted(tracked.request_id, num_cached, num_loaded, 0, told, is_early))
        return events

    def release(self, tracked: TrackedRequest) -> None:
        """Remember a request that has ended, for the next `drain`."""
        self._to_release.append(tracked)

    def free(self, freed: Sequence[Freed]) -> None:
        """Remember blocks that were freed since the last step. The next `drain` releases them."""
        self._to_free += freed

    def _free(self, freed: Sequence[Freed]) -> None:
        for tracked, block, is_cached in freed:
            assert self._pool is not None
            owner = None if tracked is None else tracked.request_id
            self._pool.free(owner, block, is_cached=is_cached)
            if tracked is not None:
                tracked.num_blocks = max(0, tracked.num_blocks - 1)

    def totals(self, kv_used: float | None) -> Totals | None:
        """Return what is known of a KV pool that is not published, and reset the counts; else None.

        Args:
            kv_used: the share of the pool in use, by the engine's own figure.
        """
        if self._pool is not None:
            return None
        looked_up = self._drain_lookups() if self._caches else (None, None)
        return Totals(
            kv_used=kv_used, num_queried_tokens=looked_up[0], num_cached_tokens=looked_up[1]
        )

    def _drain_lookups(self) -> tuple[int, int]:
        looked_up = self._num_queried, self._num_hit
        self._num_queried = self._num_hit = 0
        return looked_up

    def drain(self) -> tuple[KVCounts | None, list[BlockMove]]:
        """Release the blocks that were freed since the last step.

        Returns:
            The block counts, and the new state of each block that changed since the last call.
        """
        pool = self._pool
        if self._judged is not None:
            for tracked in self._to_release:
                self._judged.released(tracked)
        self._to_release.clear()
        self._free(self._to_free)
        self._to_free.clear()
        if pool is None:
            return None, []
        moves = pool.drain()
        return pool.counts(*self._drain_lookups()), moves
