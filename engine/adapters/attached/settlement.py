"""`Settlement`: applies the effects of steps on requests and blocks, in publication order.

While two steps are in flight, the engine's own state is ahead of the published state. So the
effects of a step are applied to the published state only when that step ends.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from stepscope.engine.adapters.attached.tracked import Freed, TrackedRequest, UnfinishedStep
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Admitted, BlockMove, Preempted, RequestEvent, Totals


class BlockGroups:
    """The group of each KV block as published, and the counts of each group; see `KVGroup`.

    `of_block`: the group of the latest holder, one byte for each block.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.of_block = bytearray(num_blocks)
        self.used, self.cached = [0] * num_groups, [0] * num_groups

    def counts(self) -> list[wire.GroupCounts]:
        return list(map(wire.GroupCounts, self.used, self.cached))

    def of_moves(self, moves: Sequence[BlockMove]) -> bytes:
        """Return the group of each moved block, one byte each."""
        return bytes([self.of_block[move.block_id] for move in moves])


class PublishedPool(Protocol):
    """The published state of the KV pool: which requests hold each block.

    `groups`: None if all blocks are of one group.
    """

    groups: BlockGroups | None

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None:
        """Add request `owner` as a holder of blocks, the first `num_hit` of them from the cache."""

    def free(self, owner: int | None, block: int, *, is_cached: bool) -> None:
        """Remove `owner` (None: an unknown one) as a holder of a block, if it is one.

        `is_cached`: whether the block's content stays in the prefix cache.
        """

    def drain(self) -> list[BlockMove]:
        """Return the new state of each block that changed since the last call."""

    def counts(self, num_queried: int = 0, num_hit: int = 0) -> wire.KVCounts:
        """Return the numbers as of the last `drain`, and the evictions since the last call.

        With them are returned the prompt tokens that were looked up in the prefix cache, and found.
        """

    def runs(self) -> list[wire.BlockRun] | None:
        """Return the state of all blocks as of the last `drain`; None: only numbers are known."""


class Judged(Protocol):
    """Says why prompts missed the prefix cache; see `JudgedBlocks` of vLLM's adapter."""

    def settled(
        self, step: UnfinishedStep, ended_now: Collection[TrackedRequest]
    ) -> Mapping[TrackedRequest, wire.PrefixMisses | None]: ...
    def released(self, tracked: TrackedRequest) -> None: ...


class Settlement:
    """Applies the effects of ended steps. Use it only while the attachment's notes are held.

    For its arguments see `StepRecorder`.
    """

    def __init__(
        self, pool: PublishedPool | None, caches_prefixes: bool, judged: Judged | None = None
    ) -> None:
        self._pool, self._judged, self._caches = pool, judged, caches_prefixes
        self._to_release: list[TrackedRequest] = []
        self._to_free: list[Freed] = []
        self._num_queried = self._num_hit = 0  # prompt tokens; since the last `drain`

    def settle(self, step: UnfinishedStep, ended_now: set[TrackedRequest]) -> list[RequestEvent]:
        """Apply the effects of a step that is about to be published. Returns its request events.

        Effects on requests that ended before this step's tokens, not with them, are skipped.
        """
        events: list[RequestEvent] = []
        for tracked in step.preempted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.num_preemptions += 1
            tracked.status = "preempted"
            events.append(Preempted(tracked.request_id, tracked.num_blocks, step.preempt_reason))
            tracked.num_blocks = 0
        misses = {} if self._judged is None else self._judged.settled(step, ended_now)
        self._free(step.freed)
        for tracked, blocks, num_hit, group in step.taken:
            if tracked.ended and tracked not in ended_now:
                continue
            if self._pool is not None:
                self._pool.take(tracked.request_id, blocks, num_hit, group)
            tracked.num_blocks += len(blocks)
        for tracked, num_cached in step.admitted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.status = "running"
            tracked.held, tracked.held_blocks = "", 0
            if not tracked.num_preemptions:
                tracked.num_cached = num_cached
                if self._caches:
                    self._num_queried += tracked.engine_request.num_prompt_tokens
                    self._num_hit += num_cached
            is_early, num_loaded = tracked.is_loaded_early, tracked.num_loaded
            told = misses.get(tracked)
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

        `kv_used`: the share of the pool in use, by the engine's own figure.
        """
        if self._pool is not None:
            return None
        queried, hit = self._drain_lookups() if self._caches else (None, None)
        return Totals(kv_used=kv_used, num_queried_tokens=queried, num_cached_tokens=hit)

    def _drain_lookups(self) -> tuple[int, int]:
        looked_up = self._num_queried, self._num_hit
        self._num_queried = self._num_hit = 0
        return looked_up

    def drain(self) -> tuple[wire.KVCounts | None, list[BlockMove]]:
        """Release the blocks that were freed since the last step. Returns counts and changes."""
        if self._judged is not None:
            for tracked in self._to_release:
                self._judged.released(tracked)
        self._to_release.clear()
        self._free(self._to_free)
        self._to_free.clear()
        if self._pool is None:
            return None, []
        moves = self._pool.drain()
        return self._pool.counts(*self._drain_lookups()), moves
