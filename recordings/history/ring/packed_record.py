"""`PackedRecord`: a packed step of a file, decoded without building all of its rows."""

from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import BatchRow, BlockMove, StepRecord
from stepscope.recordings.state.blocks import SoundMove


class PackedRecord(StepRecord, frozen=True, kw_only=True, tag="StepRecord"):
    """A step record in the packed form of a file (see `packing.steps`).

    Its `batch` holds the block size, then full rows and counts of rows. Decoding fails if it moves
    blocks with impossible numbers.
    """

    batch: list[int | BatchRow]  # type: ignore[assignment]
    moves: list[SoundMove] = msgspec.field(default_factory=list)  # type: ignore[assignment]

    def spelled_out(self, rows: list[BatchRow]) -> StepRecord:
        """The unpacked record, given the rows of its batch."""
        fields = {name: getattr(self, name) for name in StepRecord.__struct_fields__}
        moves = [BlockMove(*msgspec.structs.astuple(move)) for move in self.moves]
        return StepRecord(**(fields | {"batch": rows, "moves": moves}))


class PackedStep(NamedTuple):
    """A packed step with its sequence number and payload."""

    sequence: int
    record: PackedRecord
    payload: bytes


decode_packed = msgspec.msgpack.Decoder(PackedRecord).decode
