"""`Settlement`: applies what steps did to requests and blocks, in the order they are published.

While two steps are in flight, the engine is ahead of what observers know. A step is settled when it
ends.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from stepscope.engine.adapters.attached.tracked import TrackedRequest
from stepscope.engine.adapters.attached.unfinished_step import UnfinishedStep
from stepscope.engine.protocol.wire import (
    Admitted,
    BlockMove,
    BlockRun,
    KVCounts,
    Preempted,
    RequestEvent,
)


class KVBooks(Protocol):
    """The KV pool as it is published.

    Attributes:
        num_queried, num_hit: tokens of prompts looked up and found, since the last `counts`.
    """

    num_queried: int
    num_hit: int

    def take(self, owner: int, blocks: Sequence[int], num_hit: int) -> None:
        """`owner` holds `blocks` now; the first `num_hit` of them were found by their content."""
        ...

    def release(self, owner: int, blocks: Iterable[int]) -> None:
        """`owner` holds `blocks` no more."""
        ...

    def look_again(self, blocks: Iterable[int]) -> None:
        """What is cached in free blocks may have changed."""
        ...

    def drain(self) -> list[BlockMove]:
        """The state of each block that changed since the last drain."""
        ...

    def counts(self) -> KVCounts:
        """As of the last drain."""
        ...

    def runs(self) -> list[BlockRun] | None:
        """All blocks as of the last drain; None where only their number is known."""
        ...


class Settlement:
    """Used only while the attachment's notes are held.

    Args:
        books: None where the engine does not say what becomes of its blocks.
        caches_prefixes: prompts are looked up in the prefix cache.
    """

    def __init__(self, books: KVBooks | None, caches_prefixes: bool) -> None:
        self._books = books
        self._caches = caches_prefixes
        self._to_release: list[TrackedRequest] = []

    def settle(self, step: UnfinishedStep, ended_now: set[TrackedRequest]) -> list[RequestEvent]:
        """Apply a step that is about to be published; what happened in it to requests."""
        events: list[RequestEvent] = []
        if not (step.preempted or step.taken or step.admitted):
            return events
        books = self._books
        for tracked in step.preempted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.num_preemptions += 1
            tracked.status = "preempted"
            events.append(Preempted(tracked.request_id, tracked.num_blocks, step.preempt_reason))
            if books is not None:
                books.release(tracked.request_id, tracked.published_blocks)
            tracked.published_blocks = []
            tracked.num_blocks = 0
        for tracked, blocks, num_hit in step.taken:
            if tracked.ended and tracked not in ended_now:
                if books is not None:
                    books.look_again(blocks)
                continue
            if books is not None:
                books.take(tracked.request_id, blocks, num_hit)
            tracked.published_blocks.extend(blocks)
            tracked.num_blocks += len(blocks)
        for tracked, num_cached in step.admitted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.status = "running"
            if not tracked.num_preemptions:
                tracked.num_cached = num_cached
                if books is not None and self._caches:
                    books.num_queried += tracked.source.num_prompt_tokens
                    books.num_hit += num_cached
            events.append(Admitted(tracked.request_id, num_cached))
        return events

    def release(self, tracked: TrackedRequest) -> None:
        """A request has ended: its blocks come back with the next `drain`."""
        self._to_release.append(tracked)

    def drain(self) -> tuple[KVCounts | None, list[BlockMove]]:
        """Blocks as they are published next, and what changed since the last call."""
        books = self._books
        for tracked in self._to_release:
            if books is not None:
                books.release(tracked.request_id, tracked.published_blocks)
            tracked.published_blocks = []
            tracked.num_blocks = 0
        self._to_release.clear()
        if books is None:
            return None, []
        moves = books.drain()
        return books.counts(), moves
