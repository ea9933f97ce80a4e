"""`KVCacheManager`: which request holds which KV blocks, and which prefixes can be hit.

Only this module changes the block table of a request; the `BlockPool` keeps the state of the
blocks. A full block is identified by the hash of its tokens *and* of all tokens before them, so
equal hashes mean equal prefixes (vLLM's chained block hashes).

A block is registered (made available for prefix hits) when the step that fills it is scheduled, so
a request admitted in the same step may hit it. That is sound because each layer of a step stores
the keys and values of all rows before any row reads them.

In this module a `hit` is the list of cached blocks that hold the beginning of a request. "For
`num_tokens` in all" counts the request's tokens from its first one. A drain returns what changed
since the last drain; there is one for each step record.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from stepscope.engine.protocol.wire import BlockMove, BlockRun, KVCounts, PrefixMisses
from stepscope.engine.scheduling.block_pool import BlockHash, BlockPool, BlockState
from stepscope.engine.scheduling.prefix_judge import PrefixJudge
from stepscope.engine.scheduling.request import Request

_ROOT = bytes(32)  # parent of every first block


class KVCacheManager:
    """Block tables of all requests, over `num_blocks` usable blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = True  # off: nothing is looked up and nothing registered
        self.num_held = 0  # entries of all block tables (a shared block counts for each holder)
        self._pool = BlockPool(num_blocks)
        self._judge: PrefixJudge | None = None
        self._holders: dict[int, Request] = {}  # in order of admission
        self._num_promised = 0  # blocks that the holders need if each reaches its max_tokens
        self._num_evicted_before = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    def judge_prompts(self, clock: Callable[[], int]) -> None:
        """From now on, `admit` says why prompts missed. `clock` returns the engine's time in ns."""
        self._judge = PrefixJudge(self.num_blocks, self.block_size, clock)
        self._pool.on_evicted = self._judge.evicted

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, empty or cached."""
        return self._pool.num_free

    @property
    def num_outstanding_blocks(self) -> int:
        """Blocks that requests in the cache will still need if all of them run to max_tokens."""
        return self._num_promised - self.num_held

    def num_blocks_in_all(self, request: Request) -> int:
        """Number of blocks to run to max_tokens; the last token's keys and values need no room."""
        return self.num_blocks_for(request.max_num_tokens - 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the longest prefix of `request` (its hit).

        Returns only whole blocks, and none with the newest token, which must be computed for its
        logits. The request does not hold the blocks yet: `admit` must follow in the same step.
        """
        if not self.enable_prefix_caching:
            return []
        hit: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self._pool.find(self.digest(request, index))
            if block is None:
                break
            hit.append(block)
        return hit

    def num_blocks_taken(self, num_tokens: int, hit: list[int]) -> int:
        """Free blocks that a request with this `hit` would use up for `num_tokens` in all."""
        return self.num_blocks_for(num_tokens) - len(hit) + self._pool.num_idle(hit)

    def admit(self, request: Request, hit: list[int], num_tokens: int) -> PrefixMisses | None:
        """Give a request the blocks of its `hit`, and more for `num_tokens` in all (all free).

        Returns why its prompt missed; None if prompts are not judged, or if it comes back.
        """
        owner = request.request_id
        misses = None
        if self.enable_prefix_caching and not request.comes_back:
            self._num_queried_tokens += request.num_tokens
            self._num_hit_tokens += len(hit) * self.block_size
            if self._judge is not None:
                misses = self._judge.admitted(
                    request.num_tokens, len(hit), lambda index: self.digest(request, index)
                )
        self._pool.share(hit, owner)
        new = self._pool.take(self.num_blocks_for(num_tokens) - len(hit), owner)
        request.block_table = hit + new
        request.num_hashed_blocks = len(hit)
        self._holders[owner] = request
        self.num_held += len(request.block_table)
        self._num_promised += self.num_blocks_in_all(request)
        return misses

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request blocks for `num_tokens` in all; False, unchanged, if too few are free."""
        count = self.num_blocks_for(num_tokens) - len(request.block_table)
        if count <= 0:
            return True
        if count > self._pool.num_free:
            return False
        request.block_table += self._pool.take(count, request.request_id)
        self.num_held += count
        return True

    def num_tokens_without_preemption(self, request: Request) -> int:
        """Number of tokens to which `request` could `grow` with the blocks that are free now."""
        return (len(request.block_table) + self._pool.num_free) * self.block_size

    def register(self, request: Request, num_tokens: int) -> None:
        """Offer a request's full blocks for prefix hits, in the step that computes them."""
        if not self.enable_prefix_caching:
            return
        num_full_blocks = num_tokens // self.block_size
        for index in range(request.num_hashed_blocks, num_full_blocks):
            digest = self.digest(request, index)
            self._pool.register(request.block_table[index], digest)
            if self._judge is not None:
                before = self.digest(request, index - 1) if index else None
                self._judge.computed(digest, before, request.request_id)
        request.num_hashed_blocks = max(request.num_hashed_blocks, num_full_blocks)

    def free(self, request: Request) -> int:
        """Take all blocks from a request. Returns how many it held."""
        num_blocks = len(request.block_table)
        if num_blocks:
            del self._holders[request.request_id]
            self._pool.release(request.block_table, request.request_id, self._heir_finder())
            self.num_held -= num_blocks
            self._num_promised -= self.num_blocks_in_all(request)
            request.block_table = []
        request.num_hashed_blocks = 0
        return num_blocks

    def reset_prefix_cache(self) -> int:
        """Make all blocks unavailable for prefix hits. Returns how many were available."""
        if self._judge is not None:
            self._judge.forget_all()
        return self._pool.forget_all()

    def counts(self) -> KVCounts:
        """Return the blocks in each state, and evictions, lookups and hits since the last drain."""
        pool = self._pool
        num_cached, num_empty = len(pool.cached), len(pool.empty)
        return KVCounts(
            self.num_blocks - num_cached - num_empty,
            num_cached,
            num_empty,
            pool.num_evicted - self._num_evicted_before,
            self._num_queried_tokens,
            self._num_hit_tokens,
        )

    def drain_moves(self) -> list[BlockMove]:
        """Return the state of each block that changed, and set the counts of the drain to zero."""
        self._reset_counts()
        return self._pool.drain_moves()

    def drain(self) -> tuple[KVCounts, msgspec.Raw | None]:
        """Return `counts` and, as msgpack, what `drain_moves` returns (None if nothing changed)."""
        counts = self.counts()
        self._reset_counts()
        return counts, self._pool.encode_moves()

    def drain_changes(self) -> dict[int, tuple[BlockState, BlockState]]:
        """Return block id -> (state at the last drain, state now), and set its counts to zero."""
        self._reset_counts()
        return self._pool.drain_changes()

    def _reset_counts(self) -> None:
        self._num_evicted_before = self._pool.num_evicted
        self._num_queried_tokens = self._num_hit_tokens = 0

    def publish_again(self, blocks: Iterable[int], counts: KVCounts) -> None:
        """Undo a drain that was not published: the next one will contain what it returned."""
        self._pool.publish_again(blocks)
        self._num_evicted_before -= counts.evicted
        self._num_queried_tokens += counts.queried_tokens
        self._num_hit_tokens += counts.hit_tokens

    def unregister(self, request: Request, num_tokens: int) -> None:
        """Make the blocks of the first tokens unavailable for hits: they have no sound content."""
        for block in request.block_table[: self.num_blocks_for(num_tokens)]:
            digest = self._pool.unregister(block)
            if digest is not None and self._judge is not None:
                self._judge.evicted(digest, None)

    def runs(self) -> list[BlockRun]:
        """Return the state of all blocks in order of their ids, run-length coded."""
        return self._pool.runs()

    def _heir_finder(self) -> Callable[[int, int], int]:
        """Return a function that finds the last admitted request that holds a block of a table."""
        heir: Request | None = None

        def find(index: int, block: int) -> int:
            nonlocal heir
            # A request that shares a block nearly always shares all blocks before it as well, at
            # the same index. So the last heir found is tried first.
            if heir is None or not _holds(heir, index, block):
                latest_first = map(self._holders.__getitem__, reversed(self._holders))
                heir = next((each for each in latest_first if _holds(each, index, block)), None)
                if heir is None:
                    raise AssertionError(f"block {block} is shared, but no other request holds it")
            return heir.request_id

        return find

    def digest(self, request: Request, index: int) -> BlockHash:
        """Return the hash of all tokens of `request` up to the end of its full block `index`."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("q", request.token_ids[start : start + self.block_size])
            parent = hashes[-1] if hashes else _ROOT
            assert isinstance(parent, bytes)  # a simulation sets all numbers at the beginning
            hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return hashes[index]


def _holds(request: Request, index: int, block: int) -> bool:
    return index < len(request.block_table) and request.block_table[index] == block


@dataclass(eq=False)
class PrefixHashes:
    """Salted 64-bit hashes of the full blocks of requests.

    The hash of a block covers all tokens up to its end, so two requests have the same tokens up to
    their last equal hash. Without the salt nobody can test whether a hash stands for a certain
    text.
    """

    kv: KVCacheManager
    salt: bytes  # a secret, different for each engine; 64 bytes at most

    def of_prompt(self, request: Request) -> list[int]:
        """Hashes of the full blocks of the prompt."""
        num_full = request.num_prompt_tokens // self.kv.block_size
        return [self._named(request, index) for index in range(num_full)]

    def of_output(self, request: Request) -> list[int]:
        """Hashes of the full blocks that follow those of the prompt, as far as tokens exist."""
        first = request.num_prompt_tokens // self.kv.block_size
        num_full = len(request.token_ids) // self.kv.block_size
        return [self._named(request, index) for index in range(first, num_full)]

    def _named(self, request: Request, index: int) -> int:
        digest = self.kv.digest(request, index)
        if isinstance(digest, int):
            digest = digest.to_bytes(16, "big", signed=True)
        return salted(digest, self.salt)


def salted(digest: bytes, salt: bytes) -> int:
    """Return the 64-bit hash to publish for the hash by which the engine identifies a block."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=salt).digest(), "big")
