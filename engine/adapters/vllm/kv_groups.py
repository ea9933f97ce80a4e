"""vLLM's groups of KV blocks, and `BlockHolders`: which requests hold which block.

Layers with a sliding window and Mamba layers give blocks back while their request runs, and no
output names those. But each block that becomes free passes through `BlockPool.free_blocks`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.engine.adapters.attached.tracked import TrackedRequest
from stepscope.engine.adapters.attached.unfinished_step import Freed, Taken
from stepscope.engine.adapters.vllm.shapes import VllmScheduler
from stepscope.engine.protocol.wire import KVGroup, KVTransfers

_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "full attention",
    "SlidingWindowSpec": "sliding window",
    "SlidingWindowMLASpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked attention",
    "MambaSpec": "Mamba",
}


def groups_of(scheduler: VllmScheduler) -> tuple[list[KVGroup], list[int]] | None:
    """Return the groups of KV blocks, and the group of each block table of vLLM.

    Block tables whose layers hold the same of a context are one group. None if vLLM has kinds of
    layers that stepscope does not know.
    """
    found: dict[tuple[str, int, int | None], list[int]] = {}  # the number of layers of each table
    keys = []
    for table in scheduler.kv_cache_config.kv_cache_groups:
        spec: Any = getattr(table, "kv_cache_spec", None)
        kind = _KINDS.get(type(spec).__name__)
        if kind is None or getattr(table, "host_resident", False):
            return None
        window = {
            "sliding window": getattr(spec, "sliding_window", None),
            "chunked attention": getattr(spec, "attention_chunk_size", None),
        }.get(kind)
        keys.append((kind, spec.block_size, window))
        found.setdefault(keys[-1], []).append(len(table.layer_names))
    groups = [
        KVGroup(kind, sum(layers), block_size, window, len(layers))
        for (kind, block_size, window), layers in found.items()
    ]
    return (groups, [list(found).index(key) for key in keys]) if groups else None


class BlockHolders:
    """Which requests hold each KV block, as scheduled. Use it inside `with notes.done()`.

    Args:
        of_table: the group of each block table of vLLM.
        block_sizes: tokens of a block of each group.
    """

    def __init__(self, of_table: list[int], block_sizes: list[int]) -> None:
        self._of_table = of_table
        self._block_sizes = block_sizes
        self._holders: dict[int, list[TrackedRequest]] = {}
        self._num_held: dict[TrackedRequest, int] = {}
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

        Args:
            num_cached: how many of its tokens came from the prefix cache.
            loads_since_ns: since when it waits for keys and values that are on their way.
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
                self._num_held[tracked] = self.num_held(tracked) + len(blocks)
        return taken

    def num_held(self, tracked: TrackedRequest) -> int:
        """Return how many blocks a request holds."""
        return self._num_held.get(tracked, 0)

    def free(self, freed: Iterable[int]) -> list[Freed]:
        """Return who held the blocks that the pool has freed, see `VllmWatcher.note_freed`.

        Call it when requests that ended or were preempted meanwhile are marked as such.
        """
        found = []
        for each in freed:
            block = (each >> 1) - 1
            if block < 0:
                continue
            tracked = self._leave(block)
            found.append(Freed(tracked, block, bool(each & 1)))
            if tracked is None:
                continue
            if tracked.block_table:
                tracked.block_table.pop()  # only its length is of use
            num_held = self._num_held[tracked] = self._num_held[tracked] - 1
            if not num_held:
                for held in (self._num_held, self._loading, self._sending):
                    held.pop(tracked, None)
        return found

    def end(self, tracked: TrackedRequest, now_ns: int) -> None:
        """Note that a request has ended. Call it after `free`."""
        self._loading.pop(tracked, None)
        if tracked in self._num_held:
            self._sending[tracked] = now_ns

    def _leave(self, block: int) -> TrackedRequest | None:
        """Remove and return the holder that has given a block back; None if nobody held it."""
        holders = self._holders.get(block)
        if not holders:
            return None
        tracked = holders[0]
        if len(holders) > 1:
            # All hold it at the same place of their context, so a window passes the longest first.
            tracked = max(
                holders,
                key=lambda each: (
                    each.ended or (each.was_preempted and not each.block_table),
                    each.source.num_computed_tokens,
                ),
            )
        holders.remove(tracked)
        return tracked

    def transfers(self) -> KVTransfers | None:
        """Return how many blocks wait for a connector, and since when; None if none does."""
        if not self._loading and not self._sending:
            return None
        return KVTransfers(
            sum(map(self.num_held, self._loading)),
            min(self._loading.values(), default=None),
            sum(map(self.num_held, self._sending)),
            min(self._sending.values(), default=None),
        )
