"""vLLM's KV blocks: `PublishedBlocks` as published; `BlockHolders`, who holds them as scheduled.

`JudgedBlocks`: what they hold, told to the judge that our own engine has, too;
`VllmPrefixHashes`: salted hashes of that.

Published block ids are one lower than vLLM's, because vLLM's block 0 belongs to no request.

Layers with a sliding window and Mamba layers give blocks back while their request runs, and no
output names those. But each block that becomes free passes through `BlockPool.free_blocks`.
"""

import secrets
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from stepscope.engine.adapters.attached.settlement import BlockGroups
from stepscope.engine.adapters.attached.tracked import (
    Freed,
    Row,
    Taken,
    TrackedRequest,
    UnfinishedStep,
    gives_token,
    num_tokens_of,
)
from stepscope.engine.adapters.vllm.versions import VllmRequest, VllmScheduler
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import CACHED, EMPTY, BlockMove, PrefixMisses
from stepscope.engine.scheduling.block_pool import REF_BITS, runs_of
from stepscope.engine.scheduling.kv_cache import salted
from stepscope.engine.scheduling.prefix_judge import PrefixJudge


class VllmPrefixHashes:
    """Salts vLLM's hashes of the full KV blocks of requests. See `Arrived.prefix_hashes`.

    With prefix caching, vLLM has a hash for each full block, over all tokens up to its end. With
    kinds of layers whose blocks differ in size it has several for each. With a drafter that reads
    ahead, 0.33 and later hash a block when those tokens are there, too.
    """

    def __init__(self, scheduler: VllmScheduler) -> None:
        self._block_size = size = scheduler.block_size
        self._num_hashes = size // getattr(scheduler, "hash_block_size", size)  # of each block
        self._num_ahead = getattr(scheduler, "num_hash_lookahead_tokens", 0)
        self._salt = secrets.token_bytes(16)

    def of_prompt(self, request: VllmRequest) -> list[int]:
        return self._between(request, 0, request.num_prompt_tokens)

    def of_output(self, request: VllmRequest) -> list[int]:
        return self._between(request, request.num_prompt_tokens, request.num_tokens)

    def _between(self, request: VllmRequest, first: int, end: int) -> list[int]:
        begin, stop = (max(0, n - self._num_ahead) // self._block_size for n in (first, end))
        every = self._num_hashes
        hashes = request.block_hashes[(begin + 1) * every - 1 : stop * every : every]
        return [salted(bytes(each), self._salt) for each in hashes]


class PublishedBlocks:
    """Tracks who holds each block, of several groups or of one (`num_groups` 0).

    Use it only inside `with attachment.notes.done()`. `num_evicted`: blocks evicted from the prefix
    cache since the last `counts`.
    """

    def __init__(self, pool: Any, num_groups: int = 0) -> None:
        self._pool = pool
        self.num_blocks = pool.num_gpu_blocks - 1
        self.groups = BlockGroups(num_groups, self.num_blocks) if num_groups else None
        self._holders: dict[int, list[int]] = {}  # of blocks in use; the latest is last
        self._free_as: dict[int, bool] = {}  # whether free blocks were cached when they were freed
        self._group_of: dict[int, int] = {}  # of blocks that were taken since the last drain
        self._changed: dict[int, None] = {}
        # As of the last drain; see `BlockPool`.
        self._published_bytes = bytearray(array("q", [EMPTY << REF_BITS]) * self.num_blocks)
        self._published = memoryview(self._published_bytes).cast("q")
        self._num_used = self._num_cached = 0
        self.num_evicted = 0

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None:
        holders, changed = self._holders, self._changed
        if self.groups is not None:
            self._group_of.update(dict.fromkeys(blocks, group))
        for i, block in enumerate(blocks):
            if block in holders:
                holders[block].append(owner)
            else:
                holders[block] = [owner]
                if i >= num_hit and self._published[block] >> REF_BITS == CACHED:
                    self.num_evicted += 1
            changed[block] = None

    def free(self, owner: int | None, block: int, *, is_cached: bool) -> None:
        self._changed[block] = None
        self._free_as[block] = is_cached
        holders = self._holders.get(block, [])
        if owner in holders:
            holders.remove(owner)
            if not holders:
                del self._holders[block]

    def drain(self) -> list[BlockMove]:
        published, holders_of, groups = self._published, self._holders, self.groups
        moves = []
        for block in self._changed:
            if holders := holders_of.get(block):
                owner, refs = holders[-1], len(holders)
            else:
                owner, refs = CACHED if self._free_as.get(block) else EMPTY, 0
            before = published[block] >> REF_BITS
            self._num_used += (owner >= 0) - (before >= 0)
            self._num_cached += (owner == CACHED) - (before == CACHED)
            if groups is not None:
                was = groups.of_block[block]
                groups.of_block[block] = now = self._group_of.pop(block, was)
                for group, each, by in ((was, before, -1), (now, owner, 1)):
                    groups.used[group] += by * (each >= 0)
                    groups.cached[group] += by * (each == CACHED)
            published[block] = owner << REF_BITS | refs
            moves.append(BlockMove(block, owner, refs))
        self._changed.clear()
        self._free_as.clear()
        return moves

    def counts(self, num_queried: int = 0, num_hit: int = 0) -> wire.KVCounts:
        used, cached = self._num_used, self._num_cached
        num_evicted, self.num_evicted = self.num_evicted, 0
        empty = self.num_blocks - used - cached
        return wire.KVCounts(used, cached, empty, num_evicted, num_queried, num_hit)

    def runs(self) -> list[wire.BlockRun]:
        return runs_of(self._published_bytes)

    def check_cached(self) -> None:
        """Let the next `drain` check every free block: vLLM has reset its prefix cache."""
        for block in range(self.num_blocks):
            if block not in self._holders:
                self._changed[block] = None
                self._free_as[block] = self._pool.blocks[block + 1].block_hash is not None


class BlockHolders:
    """Which requests hold each KV block, and how many (`num_held`), as scheduled.

    Use it inside `with notes.done()`. `of_table`: the group of each block table of vLLM;
    `block_sizes`: tokens of a block of each group.
    """

    def __init__(self, of_table: list[int], block_sizes: list[int]) -> None:
        self._of_table, self._block_sizes = of_table, block_sizes
        self._holders: dict[int, list[TrackedRequest]] = {}
        self.num_held: Counter[TrackedRequest] = Counter()
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

        `num_cached` of its tokens came from the prefix cache. Since `loads_since_ns` it waits for
        keys and values that are on their way.
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
                self.num_held[tracked] += len(blocks)
        return taken

    def free(self, freed: Iterable[int]) -> list[Freed]:
        """Return who held the blocks that the pool has freed, see `VllmWatcher.note_freed`.

        Call it when requests that ended or were preempted meanwhile are marked as such.
        """
        found = []
        for each in freed:
            block = (each >> 1) - 1
            if block < 0:
                continue
            holders = self._holders.get(block, [])
            tracked = max(holders, key=_leaves_first, default=None)
            found.append(Freed(tracked, block, bool(each & 1)))
            if tracked is not None:
                holders.remove(tracked)
                if tracked.block_table:
                    tracked.block_table.pop()  # only its length is of use
                self.num_held[tracked] -= 1
                if not self.num_held[tracked]:
                    for held in (self.num_held, self._loading, self._sending):
                        held.pop(tracked, None)
        return found

    def end(self, tracked: TrackedRequest, now_ns: int) -> None:
        """Note that a request has ended. Call it after `free`."""
        self._loading.pop(tracked, None)
        if tracked in self.num_held:
            self._sending[tracked] = now_ns

    def transfers(self) -> wire.KVTransfers | None:
        """Return how many blocks wait for a connector, and since when; None if none does."""
        if not self._loading and not self._sending:
            return None
        return wire.KVTransfers(
            sum(self.num_held[each] for each in self._loading),
            min(self._loading.values(), default=None),
            sum(self.num_held[each] for each in self._sending),
            min(self._sending.values(), default=None),
        )


def _leaves_first(holder: TrackedRequest) -> tuple[bool, int]:
    # All holders have the block at the same place of their context: a window passes the longest.
    has_left = holder.ended or (holder.was_preempted and not holder.block_table)
    return has_left, holder.engine_request.num_computed_tokens


class JudgedBlocks:
    """Follows the contents of blocks. Use it only inside `with attachment.notes.done()`.

    vLLM offers a full block for hits when it schedules the step that fills it. Blocks of output are
    noted when their request receives the next one, or loses them: nobody can evict them before.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._judge = PrefixJudge(num_blocks, block_size)
        self._contents: list[bytes | None] = [None] * num_blocks
        self._num_noted: dict[TrackedRequest, int] = {}  # full blocks of those that hold some
        self._blocks: dict[TrackedRequest, list[int]] = {}  # of those, in order
        self._decoding: set[TrackedRequest] = set()

    def settled(
        self, step: UnfinishedStep, ended_now: Collection[TrackedRequest]
    ) -> dict[TrackedRequest, PrefixMisses | None]:
        """Note what an ended step has done; return why prompts that it admitted missed the cache.

        Requests that ended before this step did are only noted as holders. The value is None if the
        request comes back.
        """
        misses: dict[TrackedRequest, PrefixMisses | None] = {}
        rows, cached = dict[TrackedRequest, Row](), dict(step.admitted)
        if step.num_prefill_tokens or cached:
            rows = {row[0]: row for row in step.rows if not row[0].ended or row[0] in ended_now}
        for tracked in step.preempted:
            if not tracked.ended or tracked in ended_now:
                self.released(tracked)
        receiving = {each.request for each in step.taken}
        for tracked, row in rows.items():
            if tracked not in receiving:
                self._computed(tracked, row)
        for tracked, blocks, num_hit, _ in step.taken:
            if tracked in cached and (not tracked.ended or tracked in ended_now):
                misses[tracked] = self._admitted(tracked, cached[tracked])
            self._took(tracked, blocks, num_hit)
            if tracked in rows:
                self._computed(tracked, rows[tracked])
        return misses

    def released(self, tracked: TrackedRequest) -> None:
        """Note that a request loses its blocks. Call it before they are taken from it."""
        if tracked in self._decoding:
            self._decoding.remove(tracked)
            self._note(tracked, tracked.engine_request.num_tokens - 1)  # the newest is not computed
        self._num_noted.pop(tracked, None)
        self._blocks.pop(tracked, None)

    def forget_all(self) -> None:
        self._judge.forget_all()
        self._contents = [None] * len(self._contents)

    def _admitted(self, tracked: TrackedRequest, num_cached: int) -> PrefixMisses | None:
        num_hit = self._num_noted[tracked] = num_cached // self._block_size
        self._blocks[tracked] = []
        hashes, num_prompt = _hashes_of(tracked), tracked.engine_request.num_prompt_tokens
        if tracked.num_preemptions or len(hashes) < num_prompt // self._block_size:
            return None
        return self._judge.admitted(num_prompt, num_hit, hashes.__getitem__)

    def _took(self, tracked: TrackedRequest, blocks: Sequence[int], num_hit: int) -> None:
        contents, hashes = self._contents, _hashes_of(tracked)
        if tracked in self._decoding:  # it has filled all that it had, but for rejected drafts
            self._note(tracked, tracked.engine_request.num_tokens - 1)
        for i, block in enumerate(blocks):
            held, now = contents[block], hashes[i] if i < num_hit else None
            if held == now:
                continue
            if held is not None:
                self._judge.evicted(held, tracked.request_id)
            contents[block] = now
            if now is not None:  # output of a request that still runs
                self._judge.computed(now, hashes[i - 1] if i else None, tracked.request_id)
        if (own := self._blocks.get(tracked)) is not None:  # else it has ended
            own += blocks

    def _computed(self, tracked: TrackedRequest, row: Row) -> None:
        self._note(tracked, row[2] + num_tokens_of(row))
        if gives_token(row):
            self._decoding.add(tracked)

    def _note(self, tracked: TrackedRequest, num_tokens: int) -> None:
        hashes, blocks = _hashes_of(tracked), self._blocks.get(tracked, [])
        end = min(num_tokens // self._block_size, len(hashes), len(blocks))
        begin = self._num_noted.get(tracked, 0)
        for i in range(begin, end):
            if self._contents[blocks[i]] is None:
                self._contents[blocks[i]] = hashes[i]
                before = hashes[i - 1] if i else None
                self._judge.computed(hashes[i], before, tracked.request_id)
        self._num_noted[tracked] = max(begin, end)


def _hashes_of(tracked: TrackedRequest) -> Sequence[bytes]:
    return cast(VllmRequest, tracked.engine_request).block_hashes
