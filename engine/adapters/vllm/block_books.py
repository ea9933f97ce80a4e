"""`BlockBooks`: the published state of vLLM's KV blocks; and salted hashes of prompt prefixes.

Published block ids are one lower than vLLM's, because vLLM's block 0 belongs to no request.

`VllmPrefixHashes`: salted hashes of prompt prefixes, from vLLM's own prefix cache.
"""

import os
import secrets
from array import array
from collections.abc import Sequence

from stepscope.engine.adapters.attached.settlement import BlockGroups
from stepscope.engine.adapters.vllm.shapes import VllmBlockPool, VllmRequest
from stepscope.engine.protocol.wire import CACHED, EMPTY, BlockMove, BlockRun, KVCounts
from stepscope.engine.scheduling.block_pool import REF_BITS, runs_of
from stepscope.engine.scheduling.prefix_hashes import salted

VARIABLE = "STEPSCOPE_PREFIX_HASHES"


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


class BlockBooks:
    """Tracks who holds each block. Use it only inside `with attachment.notes.done()`.

    Args:
        num_groups: number of groups that the blocks are told apart by; 0: they are all of one.

    Attributes:
        groups: see `BlockGroups`. None if all blocks are of one group.
        num_evicted: blocks evicted from the prefix cache since the last `counts`.
        num_queried, num_hit: see `KVBooks`.
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
        self.num_evicted = self.num_queried = self.num_hit = 0

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None:
        """See `KVBooks`."""
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
        """See `KVBooks`."""
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
        """See `KVBooks`."""
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

    def counts(self) -> KVCounts:
        """See `KVBooks`."""
        num_empty = self.num_blocks - self._num_used - self._num_cached
        found = KVCounts(
            self._num_used,
            self._num_cached,
            num_empty,
            self.num_evicted,
            self.num_queried,
            self.num_hit,
        )
        self.num_evicted = self.num_queried = self.num_hit = 0
        return found

    def runs(self) -> list[BlockRun]:
        """See `KVBooks`."""
        return runs_of(self._published_bytes)

    def check_cached(self) -> None:
        """Let the next `drain` check every free block.

        Call it when vLLM has reset its prefix cache.
        """
        for block, refs in enumerate(self._ref_counts):
            if not refs:
                self._changed[block] = None
                self._free_as[block] = self._pool.blocks[block + 1].block_hash is not None
