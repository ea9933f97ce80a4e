"""The KV pool and the radix cache of the stand-in for SGLang, in whole pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

PAGE = 4  # tokens


@dataclass
class ReqKvInfo:
    """What a request holds. Its first `num_locked` pages are those of the radix cache."""

    kv_committed_len: int = 0
    num_locked: int = 0
    num_pages: int = 0


@dataclass
class EvictResult:
    num_tokens_evicted: int = 0


@dataclass
class RadixCache:
    """Pages of finished requests, each by all tokens up to its end, with its number of users."""

    pages: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_free: int = 0  # of the pool
    num_evicted: int = 0

    def match(self, ids: Sequence[int]) -> int:
        """How many pages of these tokens are cached."""
        count = 0
        while (count + 1) * PAGE <= len(ids) and tuple(ids[: (count + 1) * PAGE]) in self.pages:
            count += 1
        return count

    def lock(self, ids: Sequence[int], num_pages: int, by: int) -> None:
        for i in range(num_pages):
            self.pages[tuple(ids[: (i + 1) * PAGE])] += by

    def evictable_size(self) -> int:
        return PAGE * sum(not users for users in self.pages.values())

    def evict(self, params: Any) -> EvictResult:
        unused = [page for page, users in self.pages.items() if not users]
        gone = sorted(unused, key=len)[::-1][: -(-params.num_tokens // PAGE)]
        for page in gone:
            del self.pages[page]
        self.num_free += len(gone)
        self.num_evicted += len(gone)
        return EvictResult(len(gone) * PAGE)

    def evict_for_alloc(self, params: Any) -> EvictResult:
        return self.evict(params)

    # The pool

    def extend(self, kv: ReqKvInfo, num_tokens: int) -> bool:
        """Give a request the pages for so many tokens; False: there are not enough."""
        num_new = max(0, -(-num_tokens // PAGE) - kv.num_pages)
        if num_new > self.num_free:
            self.evict_for_alloc(SimpleNamespace(num_tokens=(num_new - self.num_free) * PAGE))
        if num_new > self.num_free:
            return False
        self.num_free -= num_new
        kv.num_pages += num_new
        kv.kv_committed_len = num_tokens
        return True

    def release(self, kv: ReqKvInfo, ids: Sequence[int], *, keep: bool) -> None:
        """A request ends or is retracted; `keep`: its full pages stay in the cache."""
        self.lock(ids, kv.num_locked, -1)
        for i in range(kv.num_locked, kv.num_pages):
            page = tuple(ids[: (i + 1) * PAGE])
            if keep and len(page) == (i + 1) * PAGE and page not in self.pages:
                self.pages[page] = 0
            else:
                self.num_free += 1
        kv.kv_committed_len = kv.num_locked = kv.num_pages = 0
