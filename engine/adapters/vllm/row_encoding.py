"""The rows of a step as msgpack, by the encoder of our own engine, compiled where that could be."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from stepscope.engine.adapters.vllm.tracked import TrackedRequest
from stepscope.engine.adapters.vllm.unfinished_step import Row
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.telemetry import batch_rows
from stepscope.engine.telemetry.batch_rows import RowFields

_Encode: TypeAlias = Callable[
    [list[Row], Phase, type[TrackedRequest], Callable[[Row], RowFields | None]], bytes
]

# It reads the slots of whatever type it is given, and the first fields of a row.
_encode = cast(_Encode, cast(Any, batch_rows.compiled or batch_rows.encode_in_python))


def encode(rows: list[Row]) -> msgspec.Raw:
    """An array of `wire.BatchRow`s.

    To be called right after scheduling, while block tables are those of this step.
    """
    return msgspec.Raw(_encode(rows, Phase.DECODE, TrackedRequest, _fields))


def _fields(row: Row) -> RowFields | None:
    return row[3]
