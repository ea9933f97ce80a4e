"""Export to Mooncake's trace format: arrivals, lengths, and shared prefixes of prompts.

One JSON object per line, in order of arrival: `timestamp` (ms since the first), `input_length`,
`output_length`, `hash_ids` of the prompt's 512-token blocks (Mooncake, FAST 2025). The ids are not
hashes, because a recording need not have tokens. They are equal where hits in the engine's prefix
cache showed that the tokens are equal (`PrefixBook`).
"""

from collections import deque
from collections.abc import Iterable
from typing import IO

import msgspec

from stepscope.engine.protocol.wire import (
    Aborted,
    Admitted,
    Arrived,
    EngineStatus,
    Finished,
    StepRecord,
)
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS
from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.prefixes import Chain, PrefixBook

_encode = msgspec.json.Encoder().encode


class _Line:
    """A request, to be written as one line once all requests that arrived earlier are written."""

    __slots__ = ("arrived", "hash_ids", "is_done", "num_output_tokens")

    def __init__(self, arrived: Arrived) -> None:
        self.arrived = arrived
        self.hash_ids: list[int] | None = None
        self.num_output_tokens = 0
        self.is_done = False


class MooncakeWriter:
    """Writes requests as lines, from the moments of a recording.

    Attributes:
        num_lines: requests written.
        num_without_output: requests left out because they got no token.
        num_before: requests left out because they arrived before the range.
        num_unfinished: requests written with the tokens they had at the end of the range.
        book: the prefix hits.
    """

    def __init__(self, stream: IO[bytes], block_size: int) -> None:
        self.num_lines = self.num_without_output = self.num_before = self.num_unfinished = 0
        self._stream = stream
        self.book = PrefixBook(block_size)
        self._lines: dict[int, _Line] = {}
        self._order: deque[int] = deque()
        self._first_ns: int | None = None
        self._before: set[int] = set()

    def take(self, moment: Moment) -> None:
        message = moment.message
        if not isinstance(message, StepRecord | EngineStatus):
            return
        admitted = []
        for event in message.events:
            if isinstance(event, Arrived):
                self._lines[event.request_id] = _Line(event)
                self._order.append(event.request_id)
            elif isinstance(event, Admitted):
                admitted.append(event)
        batch = (message.batch or []) if isinstance(message, StepRecord) else []
        for request_id, chain in self.book.take(message.moves, batch, admitted).items():
            self._admitted(request_id, chain)
        for row in batch:
            if row.request_id not in self._lines and row.request_id not in self._before:
                self._before.add(row.request_id)
                self.num_before += 1
        for event in message.events:
            if isinstance(event, Finished | Aborted):
                self._end(event, moment)
        self._write_ready()

    def close(self, last: Moment | None) -> None:
        """Write the requests that had not ended at the end of the range."""
        for request_id, line in self._lines.items():
            view = None if last is None else last.state.requests.get(request_id)
            if not line.is_done:
                line.is_done = True
                line.num_output_tokens = 0 if view is None else view.num_output_tokens
                self.num_unfinished += line.num_output_tokens > 0
        self._write_ready()

    def _admitted(self, request_id: int, chain: Chain) -> None:
        line = self._lines.get(request_id)
        if line is None or line.hash_ids is not None:
            return
        num_tokens = line.arrived.num_prompt_tokens
        line.hash_ids = list(chain.first(num_tokens // HASH_BLOCK_TOKENS))
        if num_tokens % HASH_BLOCK_TOKENS:
            line.hash_ids.append(self.book.new_id())

    def _end(self, event: Finished | Aborted, moment: Moment) -> None:
        self.book.leave(event.request_id)
        self._before.discard(event.request_id)
        line = self._lines.get(event.request_id)
        if line is None:
            return
        line.is_done = True
        view = moment.state.requests.get(event.request_id)
        line.num_output_tokens = (
            event.num_output_tokens
            if isinstance(event, Finished)
            else 0
            if view is None
            else view.num_output_tokens
        )

    def _write_ready(self) -> None:
        while self._order and self._lines[self._order[0]].is_done:
            line = self._lines.pop(self._order.popleft())
            if line.num_output_tokens < 1 or line.arrived.num_prompt_tokens < 1:
                self.num_without_output += 1
                continue
            if self._first_ns is None:
                self._first_ns = line.arrived.time_ns
            document = {
                "timestamp": round((line.arrived.time_ns - self._first_ns) / 1e6),
                "input_length": line.arrived.num_prompt_tokens,
                "output_length": line.num_output_tokens,
                "hash_ids": line.hash_ids or [],
            }
            self._stream.write(_encode(document) + b"\n")
            self.num_lines += 1


def write_mooncake(
    moments: Iterable[Moment], stream: IO[bytes], block_size: int | None
) -> MooncakeWriter:
    """Write the requests. Returns the `MooncakeWriter`, which has counts of what was written."""
    writer = MooncakeWriter(stream, block_size or HASH_BLOCK_TOKENS)
    last: Moment | None = None
    for last in moments:
        writer.take(last)
    writer.close(last)
    return writer
