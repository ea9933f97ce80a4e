"""`BlockMap`: owner and reference count of every KV block, as an observer knows them.

`CompressedPayloads`: what is kept in little room, such as stored maps and messages.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import zstandard

from stepscope.engine.protocol.wire import EMPTY, BlockMove, BlockRun

MAX_BLOCKS = 1 << 24
_LIMIT = 1 << 62
_LEVEL = 1  # 3 takes twice the time for a twentieth less


class CompressedPayloads:
    """The messages of a finished segment. Immutable."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, payloads: list[bytes]) -> None:
        blob = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(payloads))
        self._blob = bytes(memoryview(blob))  # a copy, as the original keeps its whole buffer
        self._ends = array("I", accumulate(map(len, payloads), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def num_bytes(self) -> int:
        return len(self._blob) + 4 * len(self._ends)

    def all(self) -> list[bytes]:
        whole = zstandard.decompress(self._blob)
        return [whole[begin:end] for begin, end in pairwise(self._ends)]


@dataclass(slots=True)
class BlockMap:
    """Owner and reference count of each KV block, in two arrays indexed by block id.

    An owner is a request id, `CACHED` or `EMPTY`. `groups` has the place of each block's group in
    `EngineInfo.kv_groups`, one byte each; None if all blocks are of one group.
    """

    owner: "array[int]"
    refs: "array[int]"
    groups: bytearray | None = None

    @classmethod
    def empty(cls, num_blocks: int, *, has_groups: bool = False) -> "BlockMap | None":
        """A map of `EMPTY` blocks; None if the number of blocks is impossible."""
        if not 0 <= num_blocks <= MAX_BLOCKS:
            return None
        groups = bytearray(num_blocks) if has_groups else None
        return cls(array("q", (EMPTY,)) * num_blocks, array("q", (0,)) * num_blocks, groups)

    @classmethod
    def from_runs(cls, runs: list[BlockRun], groups: bytes | None = None) -> "BlockMap | None":
        """Build a map from the block runs of a snapshot; None if it has more than `MAX_BLOCKS`.

        `groups`: see `Snapshot.block_groups`.
        """
        counts = [run.count for run in runs]
        if min(counts, default=0) < 0:
            counts = [max(0, count) for count in counts]
        if sum(counts) > MAX_BLOCKS:
            return None
        owner: list[int] = []
        refs: list[int] = []
        for run, count in zip(runs, counts, strict=True):
            if count == 1:  # as in most runs
                owner.append(run.owner)
                refs.append(run.ref_count)
            else:
                owner += [run.owner] * count
                refs += [run.ref_count] * count
        known = None if groups is None or len(groups) != len(owner) else bytearray(groups)
        return cls(array("q", owner), array("q", refs), known)

    def runs(self) -> list[BlockRun]:
        pairs = zip(self.owner, self.refs, strict=True)
        return [
            BlockRun(len(list(group)), owner, ref_count)
            for (owner, ref_count), group in groupby(pairs)
        ]

    def copy(self) -> "BlockMap":
        return BlockMap(self.owner[:], self.refs[:], self.groups and self.groups[:])

    def pack(self) -> CompressedPayloads:
        """Compress it, for keyframes (stored states) of engines with many KV blocks."""
        groups = [] if self.groups is None else [bytes(self.groups)]
        return CompressedPayloads([self.owner.tobytes(), self.refs.tobytes(), *groups])

    @classmethod
    def unpacked(cls, packed: CompressedPayloads) -> "BlockMap":
        owner, refs, *groups = packed.all()
        return cls(array("q", owner), array("q", refs), bytearray(groups[0]) if groups else None)

    def apply(self, moves: Sequence[BlockMove], groups: bytes | None = None) -> None:
        """Set owner and reference count of the moved blocks; skip unknown and impossible ones.

        `groups`: see `StepRecord.move_groups`.
        """
        owner, refs = self.owner, self.refs
        if self.groups is not None and groups is not None:
            for move, group in zip(moves, groups, strict=False):
                if 0 <= move.block_id < len(self.groups):
                    self.groups[move.block_id] = group
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
