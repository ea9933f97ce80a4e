"""`PrefixBook`: finds which requests' prompts begin alike, from the moves of KV blocks.

A recording need not have tokens, so tokens cannot be hashed here. But an engine with a prefix cache
has hashed them and publishes its hits: a request admitted with a hit gets blocks that another
request filled with the same tokens. The cache identifies a block by its tokens and all tokens
before them. So the last block of a hit shows which request filled the prefix, and how long the
prefix is.

Three kinds of shared tokens are missed: prefixes that were no longer cached, tokens after a hit,
and hits on blocks that were filled in the same step.
"""

from itertools import count
from typing import NamedTuple

from stepscope.engine.protocol.wire import EMPTY, Admitted, BatchRow, BlockMove
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS


class Chain:
    """Ids of the blocks of one request's context. An id is created when it is first asked for."""

    __slots__ = ("_ids", "_new_ids")

    def __init__(self, ids: list[int], new_ids: "count[int]") -> None:
        self._ids = ids
        self._new_ids = new_ids

    def first(self, num_blocks: int) -> list[int]:
        while len(self._ids) < num_blocks:
            self._ids.append(next(self._new_ids))
        return self._ids[:num_blocks]


class _Table(NamedTuple):
    """The KV blocks of one request in the order of its context; None for an unknown block."""

    chain: Chain
    blocks: list[int | None]


class PrefixBook:
    """Tracks which request filled each KV block, and which block of its context that was.

    At most as many blocks are tracked as the KV cache has. The chain of a request is forgotten when
    none of its blocks is left.

    Attributes:
        num_hits: prompts with a hit. What a request finds of its own after a preemption is none.
        num_unknown: hits that cannot be traced to a request.

    Args:
        id_tokens: number of tokens per id.
    """

    def __init__(self, block_size: int, id_tokens: int = HASH_BLOCK_TOKENS) -> None:
        self.num_hits = self.num_unknown = 0
        self._id_tokens = id_tokens
        self._block_size = block_size
        self._new_ids: count[int] = count()
        self._filled: dict[int, tuple[Chain, int]] = {}
        self._tables: dict[int, _Table] = {}

    def new_id(self) -> int:
        """Return a new id, for a block taken to have the same tokens as no other block."""
        return next(self._new_ids)

    def take(
        self, moves: list[BlockMove], batch: list[BatchRow], admitted: list[Admitted]
    ) -> dict[int, Chain]:
        """Process the moves, rows and admissions of a step.

        Returns:
            Request id -> chain of each request that the step admitted.
        """
        by_owner: dict[int, list[int]] = {}
        shared = [move.block_id for move in moves if move.ref_count > 1]
        for move in moves:
            if move.owner == EMPTY:
                self._filled.pop(move.block_id, None)
            elif move.owner >= 0 and move.ref_count > 0:
                by_owner.setdefault(move.owner, []).append(move.block_id)
        chains: dict[int, Chain] = {}
        for event in admitted:
            moved = by_owner.get(event.request_id, [])
            chains[event.request_id] = self._admit(event, moved, shared)
        for row in batch:
            table = self._tables.get(row.request_id)
            if table is not None:  # else it arrived before the range
                self._grow(table, by_owner.get(row.request_id, []), row.num_blocks)
        return chains

    def leave(self, request_id: int) -> None:
        """Note that a request has ended.

        Later hits on these blocks are still found.
        """
        self._tables.pop(request_id, None)

    def _admit(self, event: Admitted, moved: list[int], shared: list[int]) -> Chain:
        num_hit = event.num_cached_tokens // self._block_size
        known = None
        if num_hit:
            known = self._origin(moved[num_hit - 1 : num_hit], num_hit)
            # It may be elsewhere, if it was freed just before or a later request shares it.
            known = known or self._origin(moved, num_hit) or self._origin(shared, num_hit)
            if event.request_id not in self._tables:
                self.num_hits += 1
                self.num_unknown += known is None
        num_whole = num_hit * self._block_size // self._id_tokens
        chain = Chain(known.first(num_whole) if known else [], self._new_ids)
        hit: list[int | None] = [*moved[:num_hit]]
        self._tables[event.request_id] = _Table(chain, hit + [None] * (num_hit - len(hit)))
        return chain

    def _origin(self, blocks: list[int], num_hit: int) -> Chain | None:
        """Find the chain that was hit: one of `blocks` is its block number `num_hit` (from 1).

        Returns None if this is true of no chain or of several.
        """
        filled = (self._filled.get(block) for block in blocks)
        chains = {id(each[0]): each[0] for each in filled if each and each[1] == num_hit - 1}
        return next(iter(chains.values())) if len(chains) == 1 else None

    def _grow(self, table: _Table, moved: list[int], num_blocks: int) -> None:
        if not moved and len(table.blocks) == num_blocks:
            return
        # A block that the request holds already is moved when another holder leaves.
        held = set(table.blocks)
        for block in moved:
            if block not in held and len(table.blocks) < num_blocks:
                self._filled[block] = (table.chain, len(table.blocks))
                table.blocks.append(block)
        table.blocks.extend([None] * (num_blocks - len(table.blocks)))
