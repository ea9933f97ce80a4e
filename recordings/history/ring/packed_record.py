"""`PackedRecord`: a step decoded as it lies in a file, without spelling out its rows."""

from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import BatchRow, BlockMove, StepRecord
from stepscope.recordings.state.blocks import SoundMove


class PackedRecord(StepRecord, frozen=True, kw_only=True, tag="StepRecord"):
    """A packed step: block size, then rows and counts of rows (`packed_steps`).

    One that moves blocks which cannot be is not decoded.
    """

    batch: list[int | BatchRow]  # type: ignore[assignment]
    moves: list[SoundMove] = msgspec.field(default_factory=list)  # type: ignore[assignment]

    def spelled_out(self, rows: list[BatchRow]) -> StepRecord:
        """The record that was packed, given its batch."""
        fields = {name: getattr(self, name) for name in StepRecord.__struct_fields__}
        moves = [BlockMove(*msgspec.structs.astuple(move)) for move in self.moves]
        return StepRecord(**(fields | {"batch": rows, "moves": moves}))


class PackedStep(NamedTuple):
    """One of a run of packed steps."""

    sequence: int
    record: PackedRecord
    payload: bytes


decode_packed = msgspec.msgpack.Decoder(PackedRecord).decode
