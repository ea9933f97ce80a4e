"""`BlockPool`: the state of every KV block, and the order in which free ones are reused.

The pool owns reference counts, owners and prefix hashes. A free block is *empty* (no content for a
prefix hit) or *cached* (its content can be hit until the block is reused). Empty blocks are reused
first, the latest freed one first; then cached ones, the least recently used first (the order of
vLLM's free queue). Operations of a step cost no more in a larger pool.
"""

import contextlib
import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.engine.protocol.wire import CACHED, EMPTY, BlockMove, BlockRun

REF_BITS = 24  # enough for all running requests, and leaves room for request ids above 2^31
_REF_MASK = (1 << REF_BITS) - 1


# Identifies the content of a full block: a hash of tokens, or a number that a simulation makes up.
BlockHash: TypeAlias = bytes | int
_Drain: TypeAlias = Callable[
    [dict[int, None], bytearray, list[int], list[int], list[BlockHash | None]], bytes
]
compiled: _Drain | None = None
with contextlib.suppress(ImportError):  # the package was installed without a C compiler
    from stepscope.engine.protocol import _wire_rows

    compiled = _wire_rows.drain_moves


class BlockState(NamedTuple):
    """State of one block: its owner (a request, CACHED or EMPTY) and its reference count."""

    owner: int
    ref_count: int


class BlockPool:
    """The state of `num_blocks` blocks with ids 0..num_blocks-1.

    Attributes:
        num_evicted: cached blocks that were reused since the pool was made.
        on_evicted: called with the content of each evicted block, and its new owner.
        empty, cached: the free blocks, in the order of reuse. Other modules may only count them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.on_evicted: Callable[[BlockHash, int], None] | None = None
        self._ref_counts = [0] * num_blocks
        self._owners = [EMPTY] * num_blocks  # the latest holder; meaningful while held
        self._digests: list[BlockHash | None] = [None] * num_blocks
        self.empty = list(range(num_blocks - 1, -1, -1))  # the next one to reuse is last
        self.cached: OrderedDict[int, None] = OrderedDict()  # the next one to reuse is first
        self._by_digest: dict[BlockHash, int] = {}
        self._copies: dict[BlockHash, list[int]] = {}  # further blocks with the same content
        self._changed: dict[int, None] = {}
        # State of each block as of the last drain: owner and reference count in one number. Packed,
        # because the numbers of a list are objects scattered over memory.
        self._published_bytes = bytearray(array("q", [EMPTY << REF_BITS]) * num_blocks)
        self._published = memoryview(self._published_bytes).cast("q")

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    def find(self, digest: BlockHash) -> int | None:
        """Return the first registered block with this content hash; None if there is none."""
        return self._by_digest.get(digest)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` no request holds: sharing these uses up free blocks."""
        ref_counts = self._ref_counts
        return sum(not ref_counts[block] for block in blocks)

    def take(self, count: int, owner: int) -> list[int]:
        """Remove `count` free blocks (the caller has checked) and give them to `owner` unshared."""
        empty = self.empty
        if count <= len(empty):
            blocks = empty[-count:] if count else []
            blocks.reverse()
            del empty[len(empty) - count :]
        else:
            assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
            blocks = empty[::-1]
            empty.clear()
            for _ in range(count - len(blocks)):
                block, _ = self.cached.popitem(last=False)
                digest = self._forget(block)
                if self.on_evicted is not None:
                    self.on_evicted(digest, owner)
                self.num_evicted += 1
                blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
            self._owners[block] = owner
            self._changed[block] = None
        return blocks

    def share(self, blocks: Sequence[int], owner: int) -> None:
        """Add `owner` as a holder of `blocks`, which `find` returned, and make it their owner."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self.cached[block]
            self._ref_counts[block] += 1
            self._owners[block] = owner
            self._changed[block] = None

    def release(self, blocks: Sequence[int], owner: int, heir: Callable[[int, int], int]) -> None:
        """End the hold of `owner` on `blocks`, its block table, in order.

        Blocks at the end of a prefix will be reused before those at its beginning, which more
        requests can hit.

        Args:
            heir: called with an index in the table and its block, if `owner` was the owner of a
                shared block; returns the request that still holds the block and becomes its owner.
        """
        ref_counts, owners, digests = self._ref_counts, self._owners, self._digests
        cached: list[int] = []
        for index, block in enumerate(blocks):
            self._changed[block] = None
            ref_counts[block] -= 1
            if ref_counts[block]:
                if owners[block] == owner:
                    owners[block] = heir(index, block)
            elif digests[block] is None:
                self.empty.append(block)
            else:
                cached.append(block)
        for block in reversed(cached):
            self.cached[block] = None

    def register(self, block: int, digest: BlockHash) -> None:
        """Register the content of a full, held block: it can be hit from now on."""
        self._digests[block] = digest
        if self._by_digest.setdefault(digest, block) != block:
            self._copies.setdefault(digest, []).append(block)

    def forget_all(self) -> int:
        """Forget the content of all registered blocks. Returns how many blocks were registered."""
        num_forgotten = len(self._by_digest) + sum(map(len, self._copies.values()))
        self._by_digest.clear()
        self._copies.clear()
        self._digests = [None] * self.num_blocks
        self._changed.update(self.cached)
        self.empty[:0] = reversed(self.cached)
        self.cached.clear()
        return num_forgotten

    def _forget(self, block: int) -> BlockHash:
        digest, self._digests[block] = self._digests[block], None
        assert digest is not None, f"block {block} has no content that could be forgotten"
        copies = self._copies.get(digest)
        if copies is None:
            del self._by_digest[digest]
            return digest
        if self._by_digest[digest] == block:
            self._by_digest[digest] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[digest]
        return digest

    def drain_moves(self) -> list[BlockMove]:
        """Return the state of each block that changed since the last drain, first changes first."""
        published, ref_counts, owners, digests = (
            self._published, self._ref_counts, self._owners, self._digests
        )  # fmt: skip
        moves = []
        for block in self._changed:
            refs = ref_counts[block]
            owner = owners[block] if refs else EMPTY if digests[block] is None else CACHED
            published[block] = owner << REF_BITS | refs
            moves.append(BlockMove(block, owner, refs))
        self._changed.clear()
        return moves

    def encode_moves(self) -> msgspec.Raw | None:
        """Do what `drain_moves` does, but return msgpack (faster); None if no block changed."""
        changed = self._changed
        if not changed:
            return None
        if compiled is None:
            return msgspec.Raw(msgspec.msgpack.encode(self.drain_moves()))
        return msgspec.Raw(
            compiled(changed, self._published_bytes, self._ref_counts, self._owners, self._digests)
        )

    def drain_changes(self) -> dict[int, tuple[BlockState, BlockState]]:
        """Return block id -> (state at the last drain, state now), for the blocks that changed."""
        published = self._published
        before = {block: published[block] for block in self._changed}
        return {
            move.block_id: (
                BlockState(before[move.block_id] >> REF_BITS, before[move.block_id] & _REF_MASK),
                BlockState(move.owner, move.ref_count),
            )
            for move in self.drain_moves()
        }

    def publish_again(self, blocks: Iterable[int]) -> None:
        """Put the state of these blocks into the next drain, whether or not it changed."""
        self._changed.update(dict.fromkeys(blocks))

    def unregister(self, block: int) -> BlockHash | None:
        """Forget the registered content of a held block, because it was not written after all.

        Returns the content; None if there was none.
        """
        return None if self._digests[block] is None else self._forget(block)

    def runs(self) -> list[BlockRun]:
        """Return the state of all blocks in order of their ids; equal neighbours make one run."""
        published = self._published
        for block in self._changed:
            refs, free = self._ref_counts[block], EMPTY if self._digests[block] is None else CACHED
            published[block] = (self._owners[block] if refs else free) << REF_BITS | refs
        return runs_of(self._published_bytes)


def runs_of(published_bytes: bytearray) -> list[BlockRun]:
    """Join neighbouring blocks in the same state (8 bytes: owner << REF_BITS | refs) into runs."""
    find_ends = _ends_of_runs if compiled is None else _wire_rows.ends_of_runs
    published = memoryview(published_bytes).cast("q")
    runs: list[BlockRun] = []
    begin = 0
    for end in find_ends(published_bytes):
        state = published[begin]
        runs.append(BlockRun(end - begin, state >> REF_BITS, state & _REF_MASK))
        begin = end
    return runs


def _ends_of_runs(published: bytearray) -> list[int]:
    states = memoryview(published).cast("q").tolist()
    places = range(1, len(states))
    return [*compress(places, map(operator.ne, states, islice(states, 1, None))), len(states)]
