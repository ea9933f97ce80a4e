"""`PoolBooks`: how many pages of SGLang's KV pool are used and cached.

SGLang does not report which request holds which page, so single pages are not published.
"""

import threading
from collections.abc import Iterable, Sequence

from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.wire import BlockMove, BlockRun, KVCounts


class PoolBooks:
    """Counts the pages. Create it on SGLang's own thread: only that thread may read the pool.

    Attributes:
        num_evicted_tokens: tokens evicted from the radix cache and not published yet.
        num_queried, num_hit: prompt tokens that were looked up in the radix cache, and those found
            in it, since the last `counts`.
    """

    def __init__(self, scheduler: SglangScheduler) -> None:
        self._observer = scheduler.pool_stats_observer
        self._page_size = scheduler.page_size
        self._thread = threading.get_ident()
        self.num_evicted_tokens = 0
        self.num_queried = self.num_hit = 0
        self._used, self._cached, self._empty = self._read()

    def evicted(self, before: int, num_tokens: int) -> None:
        """Count the tokens of an eviction.

        Evictions may be nested: one SGLang method calls the other. So the count is set, and not
        only increased.

        Args:
            before: value of `num_evicted_tokens` before this eviction.
            num_tokens: tokens that it evicted, including those of a nested eviction.
        """
        self.num_evicted_tokens = before + num_tokens

    def counts(self) -> KVCounts:
        """Return the page counts.

        On another thread than SGLang's, used and cached are those read last.
        """
        if threading.get_ident() == self._thread:
            self._used, self._cached, self._empty = self._read()
        num_evicted, self.num_evicted_tokens = divmod(self.num_evicted_tokens, self._page_size)
        found = KVCounts(
            self._used, self._cached, self._empty, num_evicted, self.num_queried, self.num_hit
        )
        self.num_queried = self.num_hit = 0
        return found

    def _read(self) -> tuple[int, int, int]:
        stats = self._observer.get_pool_stats()
        num_cached = stats.full_evictable_size // self._page_size
        num_empty = stats.full_available_size // self._page_size
        num_pages = stats.full_capacity // self._page_size
        return max(0, num_pages - num_cached - num_empty), num_cached, num_empty

    # These do nothing, because the owners of pages are unknown

    def take(self, owner: int, blocks: Sequence[int], num_hit: int) -> None: ...
    def release(self, owner: int, blocks: Iterable[int]) -> None: ...
    def look_again(self, blocks: Iterable[int]) -> None: ...

    def drain(self) -> list[BlockMove]:
        return []

    def runs(self) -> list[BlockRun] | None:
        return None
