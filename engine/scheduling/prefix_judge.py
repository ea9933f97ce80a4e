"""`PrefixJudge`: why tokens of prompts were not in the prefix cache, and what a larger one had hit.

It is told what blocks of KV hold, and remembers the contents of the last evicted ones: as many as
twice the pool. Equal hashes mean equal prefixes. Each call takes time for its own blocks alone.

Of the remembered contents ("ghosts") the first ones, latest use first, are what a larger pool would
still hold, as blocks are reused in the order of their last use (Mattson and others, 1970). That is
exact for requests one after another. If several run at once, it is an estimate: in a larger pool
other requests would have run at the same time.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from stepscope.engine.protocol.wire import PrefixMisses
from stepscope.engine.scheduling.block_pool import BlockHash

_NUM_LARGER = 2  # pools 1.5 and 2 times as large


class _Content(msgspec.Struct, gc=False):
    """What blocks hold, or held.

    Attributes:
        request_id: the request that computed it.
        part: the part of the ghosts that it is in; -1: it is in the cache.
        following: what was computed last after it.
    """

    request_id: int
    born_ns: int
    num_blocks: int = 1
    part: int = -1
    following: BlockHash | None = None
    evicted_by: int | None = None
    evicted_ns: int = 0


class PrefixJudge:
    """Judges the prompts of one KV cache. Belongs to one thread.

    Args:
        clock: returns the engine's time, in nanoseconds.
    """

    def __init__(
        self, num_blocks: int, block_size: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._block_size = block_size
        self._clock = clock
        self._contents: dict[BlockHash, _Content] = {}
        # The ghosts, latest use last: what each larger pool holds beyond the one before, and more.
        self._rooms = (num_blocks // 2, num_blocks - num_blocks // 2, num_blocks)
        self._parts: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in self._rooms]

    def admitted(
        self, num_prompt_tokens: int, num_hit: int, hash_of: Callable[[int], BlockHash]
    ) -> PrefixMisses:
        """Judge a prompt that is admitted. Call it before its blocks are taken.

        Args:
            num_hit: number of its blocks that were in the cache.
            hash_of: returns the hash of a full block of the prompt, by index.
        """
        contents, size = self._contents, self._block_size
        num_lookups = (num_prompt_tokens - 1) // size  # the last token is always computed
        ghosts: list[tuple[BlockHash, _Content]] = []
        more, part, end = [0] * _NUM_LARGER, 0, num_hit
        while end < num_lookups:
            content = contents.get(hash_of(end))
            if content is None or (content.part < 0 and not ghosts):
                break
            if content.part >= 0:
                ghosts.append((hash_of(end), content))
            part = max(part, content.part)
            for larger in range(part, _NUM_LARGER):
                more[larger] += size
            end += 1
        first = ghosts[0][1] if ghosts else _Content(-1, 0)
        num_diverged, other = 0, None
        if 0 < end < num_prompt_tokens // size and hash_of(end) not in contents:
            before = contents.get(hash_of(end - 1))
            following = None if before is None else before.following
            other = None if following is None else contents.get(following)
            if other is not None:
                num_diverged = num_prompt_tokens - end * size
        misses = PrefixMisses(
            num_evicted=(end - num_hit) * size,
            num_diverged=num_diverged,
            num_more_hits_1_5x=more[0],
            num_more_hits_2x=more[1],
            diverged_from=None if other is None else other.request_id,
            evicted_by=first.evicted_by,
            evicted_ns=first.evicted_ns if ghosts else None,
            life_ns=first.evicted_ns - first.born_ns if ghosts else None,
        )
        for block_hash, content in reversed(ghosts):
            self._take_out(block_hash, content)
            self._put_in(block_hash, content)
        return misses

    def computed(self, block_hash: BlockHash, before: BlockHash | None, request_id: int) -> None:
        """Note that a block holds this from now on, after what `before` stands for."""
        content = self._contents.get(block_hash)
        if content is not None and content.part < 0:
            content.num_blocks += 1
        else:
            if content is not None:
                self._take_out(block_hash, content)
            following = None if content is None else content.following
            content = _Content(request_id, self._clock(), following=following)
            self._contents[block_hash] = content
        if before is not None and (parent := self._contents.get(before)) is not None:
            parent.following = block_hash

    def evicted(self, block_hash: BlockHash, request_id: int | None) -> None:
        """Note that a block was reused for this request. None: it was not written after all."""
        content = self._contents.get(block_hash)
        if content is None:
            return
        content.num_blocks -= 1
        if not content.num_blocks and request_id is None:
            del self._contents[block_hash]
        elif not content.num_blocks:
            content.evicted_by, content.evicted_ns = request_id, self._clock()
            self._put_in(block_hash, content)

    def forget_all(self) -> None:
        """Forget all, because the prefix cache was reset."""
        self._contents.clear()
        for part in self._parts:
            part.clear()

    def _put_in(self, block_hash: BlockHash, content: _Content) -> None:
        """Add the ghost that was used last. What is then too many moves to the next part."""
        for part, (ghosts, room) in enumerate(zip(self._parts, self._rooms, strict=True)):
            ghosts[block_hash] = None
            content.part = part
            if len(ghosts) <= room:
                return
            block_hash, _ = ghosts.popitem(last=False)
            content = self._contents[block_hash]
        del self._contents[block_hash]

    def _take_out(self, block_hash: BlockHash, content: _Content) -> None:
        """Remove a ghost, and fill its place from the parts that follow."""
        first, content.part = content.part, -1
        del self._parts[first][block_hash]
        for part in range(first, len(self._parts) - 1):
            ghosts, rest = self._parts[part : part + 2]
            if not rest:
                return
            latest, _ = rest.popitem()
            ghosts[latest] = None
            ghosts.move_to_end(latest, last=False)
            self._contents[latest].part = part
