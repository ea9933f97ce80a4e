"""Packed steps: batch rows that continue as expected are counted, not written.

Most rows of a step are decodes of requests that were in the previous step, one token further. Their
positions would take most of a file (150 of 270 bytes for a step of 64 requests, after compression).
So the `batch` of a packed step is the difference from the previous batch:

    n > 0      the next n rows of the previous step continue: one token decoded
    n < 0      the next -n rows of the previous step are not in this step
    [...]      a row as it is on the wire

Its first entry is the block size that the packer assumed. Everything else stays as received,
unknown fields included. A step that would not unpack byte for byte is not packed. To unpack a step,
all steps since the last unpacked one are needed; the writer keeps these few, and in the same chunk.
"""

from typing import Any

import msgspec

from stepscope.engine.protocol.wire import Phase, RowFlag

_DECODE = int(Phase.DECODE)
_LAST_CHUNK = int(RowFlag.LAST_CHUNK)
_NUM_COLUMNS = 7
_NEVER_FULL = 1 << 62

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode

_Row = list[Any]


class StepPacker:
    """Packs one step after another. Each must have been decoded as a `StepRecord` before.

    `block_size`: tokens of a KV block; None if unknown. With a wrong size, less is packed, but
    nothing is lost.
    """

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size or 0
        self._before: list[_Row] | None = None

    def reset(self) -> None:
        """Make the next step independent of earlier steps, so that unpacking can begin with it."""
        self._before = None

    def pack(self, payload: bytes) -> bytes | None:
        """Pack an encoded `StepRecord`; None if it must be written unpacked."""
        message = _decode(payload)
        batch = message.get("batch")
        before, self._before = self._before, batch
        if before is None or self._before is None or _encode(message) != payload:
            return None
        message["batch"] = self._packed(before, self._before)
        return _encode(message)

    def _packed(self, before: list[_Row], batch: list[_Row]) -> list[int | _Row]:
        packed: list[int | _Row] = [self.block_size]
        expected = _next_rows(before, self.block_size)
        # In most steps, all rows are as expected, or all up to a request that has ended.
        same = 0
        for row, next_row in zip(batch, expected, strict=False):
            if row != next_row:
                break
            same += 1
        next_place = num_going_on = same
        rest = batch[same:]
        places = {before[place][0]: place for place in range(same, len(before))} if rest else {}
        for row in rest:
            place = places.get(row[0], -1)
            if place >= next_place and row == expected[place]:
                if place > next_place:
                    if num_going_on:
                        packed.append(num_going_on)
                        num_going_on = 0
                    packed.append(next_place - place)
                num_going_on += 1
                next_place = place + 1
                continue
            if num_going_on:
                packed.append(num_going_on)
                num_going_on = 0
            packed.append(row)
        if num_going_on:
            packed.append(num_going_on)
        return packed


class StepUnpacker:
    """Unpacks steps. Feed it every step, packed or not, since the last reset of the packer."""

    def __init__(self) -> None:
        self._before: list[_Row] | None = None

    def take(self, payload: bytes) -> None:
        self._before = _decode(payload).get("batch")

    def unpack(self, payload: bytes) -> bytes:
        """Return the encoded `StepRecord` of a packed step, byte for byte.

        Raises ValueError: it does not fit the steps before it.
        """
        return _encode(self.skip(payload))

    def skip(self, payload: bytes) -> dict[str, Any]:
        """Feed a packed step without encoding its record. Returns the fields of that."""
        before = self._before
        if before is None:
            raise ValueError("a packed step without the step before it")
        message: dict[str, Any] = _decode(payload)
        block_size, *items = message["batch"]
        batch: list[_Row] = []
        place = 0
        for item in items:
            if isinstance(item, list):
                batch.append(item)
            elif item > 0:
                if place + item > len(before):
                    raise ValueError("a packed step with more rows than the step before it")
                batch += _next_rows(before[place : place + item], block_size)
                place += item
            else:
                place -= item
        message["batch"] = self._before = batch
        return message


def _next_rows(rows: list[_Row], block_size: int) -> list[_Row]:
    """The rows of the next step if all requests continue with one more token.

    A request gets a new block if its last block is full.
    """
    # Not factored out into functions, because this is most of the work.
    size = block_size or _NEVER_FULL
    expected = [
        [
            row[0],
            _DECODE,
            row[2] + row[3],
            1,
            0,
            row[5] + 1 if row[2] + row[3] >= row[5] * size else row[5],
            _LAST_CHUNK,
        ]
        for row in rows
    ]
    if rows and len(rows[0]) > _NUM_COLUMNS:
        # Columns of a later schema: guess that their values repeat.
        for row, next_row in zip(rows, expected, strict=True):
            next_row += row[_NUM_COLUMNS:]
    return expected
