"""Requests, batches, KV pool and radix cache of the stand-in for SGLang's scheduler.

The pool is in whole pages.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

PAGE = 4  # tokens


@dataclass
class ReqKvInfo:
    """The KV pages of a request. The first `num_locked` belong to the radix cache."""

    kv_committed_len: int = 0
    num_locked: int = 0
    num_pages: int = 0


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

    def evict(self, params: Any) -> SimpleNamespace:
        unused = [page for page, users in self.pages.items() if not users]
        gone = sorted(unused, key=len)[::-1][: -(-params.num_tokens // PAGE)]
        for page in gone:
            del self.pages[page]
        self.num_free += len(gone)
        self.num_evicted += len(gone)
        return SimpleNamespace(num_tokens_evicted=len(gone) * PAGE)

    def evict_for_alloc(self, params: Any) -> SimpleNamespace:
        return self.evict(params)

    # The pool

    def extend(self, kv: ReqKvInfo, num_tokens: int) -> bool:
        """Give a request the pages for this many tokens; False: there are not enough."""
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
        """End or retract a request; `keep`: its full pages stay in the cache."""
        self.lock(ids, kv.num_locked, -1)
        for i in range(kv.num_locked, kv.num_pages):
            page = tuple(ids[: (i + 1) * PAGE])
            if keep and len(page) == (i + 1) * PAGE and page not in self.pages:
                self.pages[page] = 0
            else:
                self.num_free += 1
        kv.kv_committed_len = kv.num_locked = kv.num_pages = 0


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_idle(self) -> bool:
        return False


@dataclass
class FinishReason:
    type: str

    def to_json(self) -> dict[str, Any]:
        return {"type": self.type}


@dataclass
class TokenizedGenerateReqInput:
    rid: str
    input_ids: list[int]
    max_new_tokens: int = 4
    stop_after: int | None = None  # it then gets a token that ends it


@dataclass
class AbortReq:
    rid: str


@dataclass
class SetInternalStateReq:
    server_args: dict[str, int]


@dataclass
class SetInternalStateReqOutput:
    updated: bool


@dataclass(eq=False)
class Req:
    rid: str
    origin_input_ids: list[int]
    sampling_params: Any
    stop_after: int | None
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    finished_reason: FinishReason | None = None
    to_finish: FinishReason | None = None
    priority: int | None = None
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    is_retracted: bool = False
    time_stats: Any = field(
        default_factory=lambda: SimpleNamespace(created_time=time.perf_counter())
    )

    @property
    def ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def next_output_finishes_by_length(self) -> bool:
        return len(self.output_ids) + 1 >= self.sampling_params.max_new_tokens

    def update_finish_state(self) -> None:
        num_output = len(self.output_ids)
        if self.to_finish is not None:
            self.finished_reason = self.to_finish
        elif num_output == self.stop_after:
            self.finished_reason, self.finished_len = FinishReason("stop"), num_output
        elif num_output >= self.sampling_params.max_new_tokens:
            self.finished_reason, self.finished_len = FinishReason("length"), num_output


@dataclass
class ScheduleBatch:
    reqs: list[Req] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE
    forward_iter: int | None = None
    batch_is_full: bool = False
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    chunked_req: Req | None = None

    def copy(self) -> "ScheduleBatch":
        return ScheduleBatch(
            self.reqs[:], self.forward_mode, self.forward_iter, chunked_req=self.chunked_req
        )

    def filter_batch(self, exclude: tuple[Req | None, ...] = ()) -> None:
        self.reqs = [req for req in self.reqs if req not in exclude and not req.finished()]
