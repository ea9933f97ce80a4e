"""`BlockLedger`: holds what an engine says of its KV blocks against the moves it told.

Every block is held by somebody (references above zero), cached, or empty; the three counts add up
to the pool, the references to the blocks that requests hold.

What a request holds is told by its rows. One that is admitted without a row (a member of a static
batch whose prompt begins in a later column) has blocks, but how many is not known until its first
row: as long as there is such a request, the references are only known to be no fewer than the
blocks of all others.
"""

from stepscope.engine.protocol.wire import (
    CACHED,
    EMPTY,
    Aborted,
    Admitted,
    BatchRow,
    BlockMove,
    Finished,
    KVCounts,
    Preempted,
    RequestEvent,
    Snapshot,
)
from stepscope.recordings.state.blocks import BlockMap


class BlockLedger:
    """The books of one pool. Everything it finds wrong is a line of text.

    Attributes:
        is_open: it knows the state of every block.
    """

    def __init__(self) -> None:
        self._blocks: BlockMap | None = None
        self._num_used = self._num_cached = self._num_empty = 0
        self._num_refs = 0
        self._held: dict[int, int] = {}
        self._num_held = 0
        self._uncounted: set[int] = set()  # hold blocks, nobody said how many

    @property
    def is_open(self) -> bool:
        return self._blocks is not None

    def close(self) -> None:
        """Something was missed: nothing is known until the next `open`."""
        self._blocks = None

    def open_empty(self, kv: KVCounts) -> None:
        """Of an engine that has not run a step yet."""
        self._take(BlockMap.empty(kv.used + kv.cached + kv.empty), {}, set())

    def open(self, snapshot: Snapshot) -> None:
        """Believe a snapshot."""
        if snapshot.blocks is None:
            self.close()
            return
        self._take(BlockMap.from_runs(snapshot.blocks), _held(snapshot), _uncounted(snapshot))

    def compare(self, snapshot: Snapshot) -> list[str]:
        """What a snapshot says otherwise than the books."""
        if self._blocks is None or snapshot.blocks is None:
            return []
        problems = []
        other = BlockMap.from_runs(snapshot.blocks)
        if other != self._blocks:
            problems.append("its blocks are not those of the moves before it")
        held = {
            each: count for each, count in _held(snapshot).items() if each not in self._uncounted
        }
        mine = self._held
        if held != mine:
            odd = sorted(set(held.items()) ^ set(mine.items()))[0][0]
            problems.append(
                f"request {odd} holds {held.get(odd, 0)} blocks in it, {mine.get(odd, 0)} by the "
                "steps before it"
            )
        return problems

    def take(
        self,
        moves: list[BlockMove],
        batch: list[BatchRow] | None,
        events: list[RequestEvent],
    ) -> list[str]:
        """What changed in a step, or between two of them.

        Args:
            batch: None where a step does not say who was in it: anybody may have got more blocks.
        """
        if self._blocks is None:
            return []
        problems = self._take_moves(self._blocks, moves)
        rows = {row.request_id: row.num_blocks for row in batch or ()}
        for request_id in list(self._held) if batch is None else rows:
            self._hold(request_id, rows.get(request_id))
        for event in events:
            if isinstance(event, Admitted):
                self._hold(event.request_id, rows.get(event.request_id))
            elif isinstance(event, Finished | Preempted | Aborted):
                self._hold(event.request_id, 0)
        return problems

    def check(self, kv: KVCounts | None) -> list[str]:
        """Whether the counts of a message are those of the books, and these agree."""
        if self._blocks is None:
            return []
        problems = []
        if kv is not None:
            mine = (self._num_used, self._num_cached, self._num_empty)
            theirs = (kv.used, kv.cached, kv.empty)
            if mine != theirs:
                problems.append(
                    "used, cached and empty blocks are {}, {}, {}; by the moves {}, {}, {}".format(
                        *theirs, *mine
                    )
                )
            elif sum(theirs) != len(self._blocks.owner):
                problems.append(
                    f"{sum(theirs)} blocks in all, the pool has {len(self._blocks.owner)}"
                )
        if self._num_refs < self._num_held or (
            self._num_refs > self._num_held and not self._uncounted
        ):
            problems.append(
                f"{self._num_refs} references to blocks, requests hold {self._num_held}"
            )
        return problems

    def _take(self, blocks: BlockMap | None, held: dict[int, int], uncounted: set[int]) -> None:
        self._blocks = blocks
        if blocks is None:
            return
        self._num_cached = blocks.owner.count(CACHED)
        self._num_empty = blocks.owner.count(EMPTY)
        self._num_used = len(blocks.owner) - self._num_cached - self._num_empty
        self._num_refs = sum(blocks.refs)
        self._held, self._uncounted = held, uncounted
        self._num_held = sum(held.values())

    def _take_moves(self, blocks: BlockMap, moves: list[BlockMove]) -> list[str]:
        problems = []
        for block_id, owner, num_refs in ((m.block_id, m.owner, m.ref_count) for m in moves):
            if not 0 <= block_id < len(blocks.owner):
                problems.append(f"block {block_id} moved, the pool has {len(blocks.owner)}")
                continue
            if owner < EMPTY or (num_refs > 0) != (owner >= 0):
                problems.append(f"block {block_id} has owner {owner} and {num_refs} references")
            self._count(blocks.owner[block_id], -1)
            self._count(owner, 1)
            self._num_refs += num_refs - blocks.refs[block_id]
            blocks.owner[block_id] = owner
            blocks.refs[block_id] = num_refs
        return problems

    def _count(self, owner: int, change: int) -> None:
        if owner == CACHED:
            self._num_cached += change
        elif owner == EMPTY:
            self._num_empty += change
        else:
            self._num_used += change

    def _hold(self, request_id: int, num_blocks: int | None) -> None:
        """From now on a request holds so many blocks; None: some, it is not told how many."""
        self._num_held += (num_blocks or 0) - self._held.pop(request_id, 0)
        if num_blocks:
            self._held[request_id] = num_blocks
        if num_blocks is None:
            self._uncounted.add(request_id)
        else:
            self._uncounted.discard(request_id)


def _held(snapshot: Snapshot) -> dict[int, int]:
    return {view.request_id: view.num_blocks for view in snapshot.requests if view.num_blocks}


def _uncounted(snapshot: Snapshot) -> set[int]:
    """A recorder's keyframe knows no more than the rows before it; who runs has blocks."""
    return {
        view.request_id
        for view in snapshot.requests
        if view.status == "running" and not view.num_blocks
    }
