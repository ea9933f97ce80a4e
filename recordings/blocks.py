"""`BlockMap`: owner and references of every KV block, as an observer knows them."""

from array import array
from itertools import chain, groupby, repeat
from typing import NamedTuple

import zstandard

from stepscope.engine.wire import EMPTY, BlockMove, BlockRun
from stepscope.recordings.payloads import compressed

MAX_BLOCKS = 1 << 24
_LIMIT = 1 << 62


class PackedBlocks(NamedTuple):
    """A compressed `BlockMap`: for keyframes of large pools."""

    owner: bytes
    refs: bytes

    def unpack(self) -> "BlockMap":
        owner, refs = zstandard.decompress(self.owner), zstandard.decompress(self.refs)
        return BlockMap(array("q", owner), array("q", refs))

    @property
    def num_bytes(self) -> int:
        return len(self.owner) + len(self.refs)


class BlockMap:
    """One entry a block in both arrays; owner is a request id, `CACHED` or `EMPTY`."""

    __slots__ = ("owner", "refs")

    def __init__(self, owner: "array[int]", refs: "array[int]") -> None:
        self.owner = owner
        self.refs = refs

    @classmethod
    def empty(cls, num_blocks: int) -> "BlockMap | None":
        """None for a pool of a size that cannot be."""
        if not 0 <= num_blocks <= MAX_BLOCKS:
            return None
        return cls(array("q", (EMPTY,)) * num_blocks, array("q", (0,)) * num_blocks)

    @classmethod
    def from_runs(cls, runs: list[BlockRun]) -> "BlockMap | None":
        """None for a pool of a size that cannot be."""
        counts = [run.count for run in runs]
        if min(counts, default=0) < 0:
            counts = [max(0, count) for count in counts]
        if sum(counts) > MAX_BLOCKS:
            return None
        owner = chain.from_iterable(map(repeat, [run.owner for run in runs], counts))
        refs = chain.from_iterable(map(repeat, [run.ref_count for run in runs], counts))
        return cls(array("q", list(owner)), array("q", list(refs)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMap) and self.owner == other.owner and self.refs == other.refs

    __hash__ = None  # type: ignore[assignment]

    def runs(self) -> list[BlockRun]:
        pairs = zip(self.owner, self.refs, strict=True)
        return [
            BlockRun(len(list(group)), owner, ref_count)
            for (owner, ref_count), group in groupby(pairs)
        ]

    def copy(self) -> "BlockMap":
        return BlockMap(self.owner[:], self.refs[:])

    def pack(self) -> PackedBlocks:
        return PackedBlocks(compressed(self.owner.tobytes()), compressed(self.refs.tobytes()))

    def apply(self, moves: list[BlockMove]) -> None:
        """Blocks that the map does not have, and owners that cannot be, are passed over."""
        owner, refs = self.owner, self.refs
        num_blocks = len(owner)
        for move in moves:
            block_id, holder, ref_count = move.block_id, move.owner, move.ref_count
            if (
                0 <= block_id < num_blocks
                and -_LIMIT < holder < _LIMIT
                and -_LIMIT < ref_count < _LIMIT
            ):
                owner[block_id] = holder
                refs[block_id] = ref_count
