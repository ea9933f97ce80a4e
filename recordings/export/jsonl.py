"""Export to JSON lines: every message as the engine sent it, its number and wall-clock time."""

from collections.abc import Iterable
from typing import IO

import msgspec

from stepscope.engine.protocol import wire
from stepscope.recordings.check.strip import stripped
from stepscope.recordings.export.moments import Moment

_encode = msgspec.json.Encoder().encode


def write_jsonl(moments: Iterable[Moment], stream: IO[bytes], *, with_tokens: bool) -> int:
    """Write the messages. Returns the number of lines.

    Batch rows of a step are lists, in the order of the fields of `BatchRow`.

    Args:
        with_tokens: also write prompts and outputs, if the recording has them.
    """
    count = 0
    for moment in moments:
        message = moment.message if with_tokens else stripped(moment.message)
        time_ns = getattr(message, "tokens_ns", None) or getattr(message, "time_ns", None)
        line = {
            "sequence": moment.sequence,
            "topic": wire.TOPICS[type(message)].decode(),
            "wall_ns": None if time_ns is None else time_ns + moment.offset_ns,
            "message": message,
        }
        stream.write(_encode(line) + b"\n")
        count += 1
    return count
