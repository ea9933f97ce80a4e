"""vLLM's KV blocks: `PublishedBlocks` as published; `BlockHolders`, who holds them as scheduled.

Published block ids are one lower than vLLM's, because vLLM's block 0 belongs to no request.

Layers with a sliding window and Mamba layers give blocks back while their request runs, and no
output names those. But each block that becomes free passes through `BlockPool.free_blocks`.

`VllmPrefixHashes`: salted hashes of prompt prefixes, from vLLM's own prefix cache.
"""

import os
import secrets
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.engine.adapters.attached.settlement import BlockGroups
from stepscope.engine.adapters.attached.tracked import Freed, Taken, TrackedRequest
from stepscope.engine.adapters.vllm.versions import VllmBlockPool, VllmRequest, VllmScheduler
from stepscope.engine.protocol.wire import (
    CACHED,
    EMPTY,
    BlockMove,
    BlockRun,
    KVCounts,
    KVGroup,
    KVTransfers,
)
from stepscope.engine.scheduling.block_pool import REF_BITS, runs_of
from stepscope.engine.scheduling.kv_cache import salted

VARIABLE = "STEPSCOPE_PREFIX_HASHES"
_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "full attention",
    "SlidingWindowSpec": "sliding window",
    "SlidingWindowMLASpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked attention",
    "MambaSpec": "Mamba",
}


class VllmPrefixHashes:
    """Salts vLLM's hashes of the full KV blocks of requests. See `Arrived.prefix_hashes`.

    Args:
        block_size: number of tokens that each hash of vLLM covers.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salt = secrets.token_bytes(16)

    @classmethod
    def if_wanted(cls, block_size: int) -> "VllmPrefixHashes | None":
        """Return an instance if STEPSCOPE_PREFIX_HASHES is "1" in the environment, else None."""
        return cls(block_size) if os.environ.get(VARIABLE, "") == "1" else None

    def of_prompt(self, request: VllmRequest) -> list[int]:
        """Return the salted hashes of the full blocks of the request's prompt."""
        return self._named(request, 0, request.num_prompt_tokens // self._block_size)

    def of_output(self, request: VllmRequest) -> list[int]:
        """Return the salted hashes of the full blocks after the prompt's full blocks."""
        first = request.num_prompt_tokens // self._block_size
        return self._named(request, first, request.num_tokens // self._block_size)

    def _named(self, request: VllmRequest, first: int, end: int) -> list[int]:
        # With prefix caching, vLLM has a hash for each full block by now.
        hashes = request.block_hashes[first:end]
        return [salted(bytes(each), self._salt) for each in hashes]


class PublishedBlocks:
    """Tracks who holds each block. Use it only inside `with attachment.notes.done()`.

    Args:
        num_groups: number of groups that the blocks are told apart by; 0: they are all of one.

    Attributes:
        groups: see `BlockGroups`. None if all blocks are of one group.
        num_evicted: blocks evicted from the prefix cache since the last `counts`.
    """

    def __init__(self, pool: VllmBlockPool, num_groups: int = 0) -> None:
        self._pool = pool
        self.num_blocks = pool.num_gpu_blocks - 1
        self.groups = BlockGroups(num_groups, self.num_blocks) if num_groups else None
        self._free_as: dict[int, bool] = {}  # whether free blocks were cached when they were freed
        self._owners = [EMPTY] * self.num_blocks  # the latest holder; valid while in use
        self._ref_counts = [0] * self.num_blocks
        self._holders: dict[int, dict[int, None]] = {}  # of blocks with several holders
        self._changed: dict[int, None] = {}
        # As of the last drain; see `BlockPool`.
        self._published_bytes = bytearray(array("q", [EMPTY << REF_BITS]) * self.num_blocks)
        self._published = memoryview(self._published_bytes).cast("q")
        self._num_used = self._num_cached = 0
        self.num_evicted = 0

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None:
        """See `PublishedPool`."""
        if self.groups is not None:
            self._regroup(self.groups, blocks, group)
        ref_counts, owners, changed = self._ref_counts, self._owners, self._changed
        for i, block in enumerate(blocks):
            count = ref_counts[block]
            if count:
                holders = self._holders.setdefault(block, {owners[block]: None})
                holders[owner] = None
            elif i >= num_hit and self._published[block] >> REF_BITS == CACHED:
                self.num_evicted += 1
            ref_counts[block] = count + 1
            owners[block] = owner
            changed[block] = None

    def _regroup(self, groups: BlockGroups, blocks: Sequence[int], group: int) -> None:
        for block in blocks:
            before, owner = groups.of_block[block], self._published[block] >> REF_BITS
            if before != group and owner != EMPTY:  # as it was last published
                counts = groups.cached if owner == CACHED else groups.used
                counts[before] -= 1
                counts[group] += 1
            groups.of_block[block] = group

    def free(self, owner: int | None, block: int, *, is_cached: bool) -> None:
        """See `PublishedPool`."""
        self._changed[block] = None
        self._free_as[block] = is_cached
        owners, count = self._owners, self._ref_counts[block] - 1
        holders = self._holders.get(block)
        if owner is None or count < 0 or owner not in (holders or (owners[block],)):
            return
        self._ref_counts[block] = count
        if holders is not None:
            del holders[owner]
            if owners[block] == owner:
                owners[block] = next(reversed(holders))
            if count == 1:
                del self._holders[block]

    def drain(self) -> list[BlockMove]:
        """See `PublishedPool`."""
        if not self._changed:
            return []
        published, ref_counts, owners = self._published, self._ref_counts, self._owners
        groups, free_as = self.groups, self._free_as
        moves = []
        for block in self._changed:
            refs = ref_counts[block]
            if refs:
                owner = owners[block]
            else:
                owner = CACHED if free_as.get(block) else EMPTY
            before = published[block] >> REF_BITS
            self._num_used += (owner >= 0) - (before >= 0)
            self._num_cached += (owner == CACHED) - (before == CACHED)
            if groups is not None:
                group = groups.of_block[block]
                groups.used[group] += (owner >= 0) - (before >= 0)
                groups.cached[group] += (owner == CACHED) - (before == CACHED)
            published[block] = owner << REF_BITS | refs
            moves.append(BlockMove(block, owner, refs))
        self._changed.clear()
        free_as.clear()
        return moves

    def counts(self, num_queried: int = 0, num_hit: int = 0) -> KVCounts:
        """See `PublishedPool`."""
        used, cached = self._num_used, self._num_cached
        num_evicted, self.num_evicted = self.num_evicted, 0
        empty = self.num_blocks - used - cached
        return KVCounts(used, cached, empty, num_evicted, num_queried, num_hit)

    def runs(self) -> list[BlockRun]:
        """See `PublishedPool`."""
        return runs_of(self._published_bytes)

    def check_cached(self) -> None:
        """Let the next `drain` check every free block.

        Call it when vLLM has reset its prefix cache.
        """
        for block, refs in enumerate(self._ref_counts):
            if not refs:
                self._changed[block] = None
                self._free_as[block] = self._pool.blocks[block + 1].block_hash is not None


def groups_of(scheduler: VllmScheduler) -> tuple[list[KVGroup], list[int]] | None:
    """Return the groups of KV blocks, and the group of each block table of vLLM.

    Block tables whose layers hold the same of a context are one group. None if vLLM has kinds of
    layers that stepscope does not know.
    """
    found: dict[tuple[str, int, int | None], list[int]] = {}  # the number of layers of each table
    keys = []
    for table in scheduler.kv_cache_config.kv_cache_groups:
        spec: Any = getattr(table, "kv_cache_spec", None)
        kind = _KINDS.get(type(spec).__name__)
        if kind is None or getattr(table, "host_resident", False):
            return None
        window = {
            "sliding window": getattr(spec, "sliding_window", None),
            "chunked attention": getattr(spec, "attention_chunk_size", None),
        }.get(kind)
        keys.append((kind, spec.block_size, window))
        found.setdefault(keys[-1], []).append(len(table.layer_names))
    groups = [
        KVGroup(kind, sum(layers), block_size, window, len(layers))
        for (kind, block_size, window), layers in found.items()
    ]
    return (groups, [list(found).index(key) for key in keys]) if groups else None


class BlockHolders:
    """Which requests hold each KV block, as scheduled. Use it inside `with notes.done()`.

    Args:
        of_table: the group of each block table of vLLM.
        block_sizes: tokens of a block of each group.
    """

    def __init__(self, of_table: list[int], block_sizes: list[int]) -> None:
        self._of_table = of_table
        self._block_sizes = block_sizes
        self._holders: dict[int, list[TrackedRequest]] = {}
        self._num_held: dict[TrackedRequest, int] = {}
        self._loading: dict[TrackedRequest, int] = {}  # and since when
        self._sending: dict[TrackedRequest, int] = {}

    def take(
        self,
        tracked: TrackedRequest,
        tables: Sequence[Sequence[int]],
        num_cached: int = 0,
        loads_since_ns: int | None = None,
    ) -> list[Taken]:
        """Note the blocks that a request received, by block table.

        Args:
            num_cached: how many of its tokens came from the prefix cache.
            loads_since_ns: since when it waits for keys and values that are on their way.
        """
        self._loading.pop(tracked, None)
        if loads_since_ns is not None:
            self._loading[tracked] = loads_since_ns
        taken = []
        for group, table in zip(self._of_table, tables, strict=True):
            blocks = []
            for block in filter(None, table):  # without vLLM's null block
                holders = self._holders.setdefault(block - 1, [])
                if tracked not in holders:
                    holders.append(tracked)
                    blocks.append(block - 1)
            if blocks:
                num_hit = sum(map(bool, table[: num_cached // self._block_sizes[group]]))
                taken.append(Taken(tracked, blocks, num_hit, group))
                self._num_held[tracked] = self.num_held(tracked) + len(blocks)
        return taken

    def num_held(self, tracked: TrackedRequest) -> int:
        """Return how many blocks a request holds."""
        return self._num_held.get(tracked, 0)

    def free(self, freed: Iterable[int]) -> list[Freed]:
        """Return who held the blocks that the pool has freed, see `VllmWatcher.note_freed`.

        Call it when requests that ended or were preempted meanwhile are marked as such.
        """
        found = []
        for each in freed:
            block = (each >> 1) - 1
            if block < 0:
                continue
            tracked = self._leave(block)
            found.append(Freed(tracked, block, bool(each & 1)))
            if tracked is None:
                continue
            if tracked.block_table:
                tracked.block_table.pop()  # only its length is of use
            num_held = self._num_held[tracked] = self._num_held[tracked] - 1
            if not num_held:
                for held in (self._num_held, self._loading, self._sending):
                    held.pop(tracked, None)
        return found

    def end(self, tracked: TrackedRequest, now_ns: int) -> None:
        """Note that a request has ended. Call it after `free`."""
        self._loading.pop(tracked, None)
        if tracked in self._num_held:
            self._sending[tracked] = now_ns

    def _leave(self, block: int) -> TrackedRequest | None:
        """Remove and return the holder that has given a block back; None if nobody held it."""
        holders = self._holders.get(block)
        if not holders:
            return None
        tracked = holders[0]
        if len(holders) > 1:
            # All hold it at the same place of their context, so a window passes the longest first.
            tracked = max(
                holders,
                key=lambda each: (
                    each.ended or (each.was_preempted and not each.block_table),
                    each.engine_request.num_computed_tokens,
                ),
            )
        holders.remove(tracked)
        return tracked

    def transfers(self) -> KVTransfers | None:
        """Return how many blocks wait for a connector, and since when; None if none does."""
        if not self._loading and not self._sending:
            return None
        return KVTransfers(
            sum(map(self.num_held, self._loading)),
            min(self._loading.values(), default=None),
            sum(map(self.num_held, self._sending)),
            min(self._sending.values(), default=None),
        )
