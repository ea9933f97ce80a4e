"""`PoolBooks`: how much of SGLang's KV pool is used and cached, in pages.

SGLang does not say which page belongs to whom, so there is no map of them.
"""

import threading
from collections.abc import Iterable, Sequence

from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.wire import BlockMove, BlockRun, KVCounts


class PoolBooks:
    """Made on SGLang's own thread, the only one that may read the pool.

    Attributes:
        num_evicted_tokens: from the radix cache, of pages that are not published yet.
        num_queried, num_hit: tokens of prompts looked up and found, since the last `counts`.
    """

    def __init__(self, scheduler: SglangScheduler) -> None:
        self._observer = scheduler.pool_stats_observer
        self._page_size = scheduler.page_size
        self._thread = threading.get_ident()
        self.num_evicted_tokens = 0
        self.num_queried = self.num_hit = 0
        self._used, self._cached, self._empty = self._read()

    def evicted(self, before: int, num_tokens: int) -> None:
        """The radix cache has evicted so many tokens; `before`: what was counted until then."""
        self.num_evicted_tokens = before + num_tokens

    def counts(self) -> KVCounts:
        """As they are now; from another thread, as they were last."""
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

    # No page has a known owner

    def take(self, owner: int, blocks: Sequence[int], num_hit: int) -> None: ...
    def release(self, owner: int, blocks: Iterable[int]) -> None: ...
    def look_again(self, blocks: Iterable[int]) -> None: ...

    def drain(self) -> list[BlockMove]:
        return []

    def runs(self) -> list[BlockRun] | None:
        return None
