"""`BatchRows`: what telemetry says of each request in a step, encoded as soon as it is scheduled.

A few hundred requests are in every record, between two forward passes; what that takes of
the engine's thread is most of what telemetry costs. So it is done in C where that could be built
(`protocol/native/batch_rows.c`), and in Python elsewhere, with the same bytes.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.wire import BatchRow, Phase, RowFlag
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow

RowFields: TypeAlias = tuple[int, int, int, int, int, int, int]  # of `wire.BatchRow`
Encode: TypeAlias = Callable[
    [list[ScheduledRow], Phase | None, type[Request], Callable[[ScheduledRow], RowFields]], bytes
]

compiled: Encode | None = None
with contextlib.suppress(ImportError):  # there was no compiler when it was installed
    from stepscope.engine.protocol import _wire_rows

    compiled = _wire_rows.encode_batch

_LAST_CHUNK = int(RowFlag.LAST_CHUNK)
_FIRST_TOKEN = int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)
_DECODE = int(Phase.DECODE)
_NUM_TOKENS = BatchRow.__struct_fields__.index("num_tokens")
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD  # msgpack


class BatchRows:
    """Encodes the rows of the steps of one scheduler as msgpack: an array of `wire.BatchRow`s."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._describe = partial(_describe, scheduler)

    def encode(self, rows: list[ScheduledRow]) -> msgspec.Raw:
        """The batch as observers see it.

        To be called between `schedule` and `update`: after it, finished requests hold no blocks and
        a first token looks like a later one.
        """
        # A resumed request, or one that was handed over, may have only its newest token to compute,
        # which is no ordinary decode.
        scheduler = self._scheduler
        ordinary = None if scheduler.resumed_now or scheduler.loaded_now else Phase.DECODE
        return msgspec.Raw(_encode(rows, ordinary, Request, self._describe))


def keep_rows(batch: msgspec.Raw, indices: Sequence[int]) -> msgspec.Raw:
    """The rows at these places."""
    rows = msgspec.msgpack.decode(batch)
    return msgspec.Raw(msgspec.msgpack.encode([rows[i] for i in indices]))


def with_num_tokens(batch: msgspec.Raw, num_tokens: Mapping[int, int]) -> msgspec.Raw:
    """With another number of tokens in the rows at these places."""
    rows = msgspec.msgpack.decode(batch)
    for index, number in num_tokens.items():
        rows[index][_NUM_TOKENS] = number
    return msgspec.Raw(msgspec.msgpack.encode(rows))


def num_rows(batch: Sequence[BatchRow] | msgspec.Raw | None) -> int:
    """Of `StepRecord.batch`, be it read or on its way out; of the latter by its first bytes."""
    if not isinstance(batch, msgspec.Raw):
        return len(batch or ())
    head = bytes(memoryview(batch)[:5])
    if head[0] == _ARRAY_16:
        return int.from_bytes(head[1:3], "big")
    if head[0] == _ARRAY_32:
        return int.from_bytes(head[1:5], "big")
    return head[0] & 0x0F


def encode_in_python(
    rows: list[ScheduledRow],
    ordinary: Phase | None,
    request_type: type[Request],
    describe: Callable[[ScheduledRow], RowFields],
) -> bytes:
    """Msgpack of the rows: those of phase `ordinary` are decodes of one token.

    Args:
        request_type: of the requests, which the compiled one wants to know.
        describe: makes the fields of all other rows.
    """
    # Plain tuples take half the time to make and read as `BatchRow` on the other side of the wire.
    return msgspec.msgpack.encode(
        [
            (row[0].request_id, _DECODE, row[2], 1, 0, len(row[0].block_table), _LAST_CHUNK)
            if row[1] is ordinary
            else describe(row)
            for row in rows
        ]
    )


def _describe(scheduler: Scheduler, row: ScheduledRow) -> RowFields:
    request, phase, start, num_tokens, samples = row
    request_id = request.request_id
    flags = 0
    if samples:
        flags = _LAST_CHUNK
        # A first token that is still to come is another step's.
        if request.num_tokens + request.num_pending_tokens == request.num_prompt_tokens:
            flags |= _FIRST_TOKEN
    if request_id in scheduler.resumed_now:
        flags |= _RESUMED
    num_cached_tokens = scheduler.admitted_now.get(request_id, 0)
    num_blocks = len(request.block_table)
    return request_id, int(phase), start, num_tokens, num_cached_tokens, num_blocks, flags


_encode: Encode = encode_in_python if compiled is None else compiled
