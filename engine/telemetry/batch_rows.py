"""`BatchRows`: encodes the rows of a step for its record, as soon as the step is scheduled.

A record has a row for each request of the step, often a few hundred. Encoding them between two
forward passes is most of what telemetry costs the engine's thread. So C does it if it could be
built (`protocol/native/batch_rows.c`), else Python, with the same bytes.
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
with contextlib.suppress(ImportError):  # the package was installed without a C compiler
    from stepscope.engine.protocol import _wire_rows

    compiled = _wire_rows.encode_batch

_LAST_CHUNK = int(RowFlag.LAST_CHUNK)
_FIRST_TOKEN = int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)
_DECODE = int(Phase.DECODE)
_START = BatchRow.__struct_fields__.index("start")  # `num_tokens` follows


class BatchRows:
    """Encodes the rows of the steps of one scheduler as msgpack: an array of `wire.BatchRow`s."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._describe = partial(_describe, scheduler)

    def encode(self, rows: list[ScheduledRow]) -> msgspec.Raw:
        """Encode the rows of a scheduled step. Call it between `schedule` and `update`.

        After `update`, finished requests hold no blocks, and a first token looks like a later one.
        """
        # A resumed or handed-over request may have a decode row that needs flags or cached tokens.
        # In a step with such a request, no row takes the fast path for ordinary decodes.
        scheduler = self._scheduler
        ordinary = None if scheduler.resumed_now or scheduler.loaded_now else Phase.DECODE
        return msgspec.Raw(_encode(rows, ordinary, Request, self._describe))


def keep_rows(batch: msgspec.Raw, indices: Sequence[int]) -> msgspec.Raw:
    rows = msgspec.msgpack.decode(batch)
    return msgspec.Raw(msgspec.msgpack.encode([rows[i] for i in indices]))


def with_positions(batch: msgspec.Raw, tokens: Mapping[int, tuple[int, int]]) -> msgspec.Raw:
    """Return `batch` with another start and token count in some rows, by row index."""
    rows = msgspec.msgpack.decode(batch)
    for index, start_and_number in tokens.items():
        rows[index][_START : _START + 2] = start_and_number
    return msgspec.Raw(msgspec.msgpack.encode(rows))


def encode_in_python(
    rows: list[ScheduledRow],
    ordinary: Phase | None,
    request_type: type[Request],
    describe: Callable[[ScheduledRow], RowFields],
) -> bytes:
    """Encode the rows as msgpack.

    Rows of the phase `ordinary` are all decodes of one token; `describe` makes the fields of all
    others. Only the C version needs `request_type`, the class of the requests.
    """
    # Plain tuples are made in half the time, and the receiver decodes them as `BatchRow`s.
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
        # If a token is pending, the first token comes from the step in flight, not from this one.
        if request.num_tokens + request.num_pending_tokens == request.num_prompt_tokens:
            flags |= _FIRST_TOKEN
    if request_id in scheduler.resumed_now:
        flags |= _RESUMED
    num_cached_tokens = scheduler.admitted_now.get(request_id, 0)
    num_blocks = len(request.block_table)
    return request_id, int(phase), start, num_tokens, num_cached_tokens, num_blocks, flags


_encode: Encode = encode_in_python if compiled is None else compiled
