"""`FastForward`: the state some hundred recorded steps further on, without looking at every row.

A packed step says of most rows only that they go on (`packed_steps`). Where just the end is wanted,
they need not be made step by step: what a request that went on is like after n steps follows from
its last row that was spelled out. A row is worked out when something happens to its request, when
it ends, and at the very end.
"""

from collections.abc import Iterable

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import BatchRow, EngineStatus, Phase, RowFlag, Snapshot, StepRecord
from stepscope.recordings.outcome import Outcome
from stepscope.recordings.session import SessionState

_DECODE = int(Phase.DECODE)
_LAST_CHUNK = int(RowFlag.LAST_CHUNK)


class PackedRecord(StepRecord, frozen=True, kw_only=True, tag="StepRecord"):
    """A packed step as it lies in a file: block size, then rows and counts of rows."""

    batch: list[int | BatchRow]  # type: ignore[assignment]


_packed = msgspec.msgpack.Decoder(PackedRecord)


class _Going:
    """A request that goes on from a row, which was that of the step `since`."""

    __slots__ = ("row", "since")

    def __init__(self, row: BatchRow, since: int) -> None:
        self.row = row
        self.since = since


class FastForward:
    """Takes messages in order, like `SessionState.apply`; `state` is right after `finish` only.

    Args:
        state: to go on from, changed in place.
    """

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._before: list[_Going] = []  # the batch of the last step
        self._chunks: set[int] = set()  # whose row of it did not end in a token
        self._count = 0  # steps so far
        self._tokens_ns = 0  # of the last one
        self._block_size = 0

    def take(self, payload: bytes) -> None:
        """A message that is not packed.

        Raises:
            msgspec.DecodeError: it is none.
        """
        message = wire.decode(payload)
        if isinstance(message, StepRecord):
            self._settle(self._before)
            self.state.apply(message)
            self._count += 1
            self._tokens_ns = message.tokens_ns
            self._before = [_Going(row, self._count) for row in message.batch or ()]
            self._chunks = _unfinished(message.batch or ())
            return
        if isinstance(message, EngineStatus):
            touched = {event.request_id for event in message.events}
            self._settle(each for each in self._before if each.row.request_id in touched)
        elif isinstance(message, Snapshot):
            self._settle(self._before)
            self._before = []
        self.state.apply(message)

    def take_packed(self, payload: bytes) -> None:
        """A packed step.

        Raises:
            msgspec.DecodeError, ValueError: it is none, or does not fit the steps before it.
        """
        record = _packed.decode(payload)
        block_size, *items = record.batch
        if not isinstance(block_size, int):
            raise ValueError("a packed step without a block size")
        if block_size != self._block_size:
            self._settle(self._before)
            self._block_size = block_size
        before, count = self._before, self._count + 1
        touched = self._chunks
        if record.events:
            touched = touched.union([event.request_id for event in record.events])
        rows: list[BatchRow] = []
        batch: list[_Going] = []
        dropped: list[_Going] = []
        place = 0
        for item in items:
            if isinstance(item, BatchRow):
                rows.append(item)
                batch.append(_Going(item, count))
            elif item > 0:
                if place + item > len(before):
                    raise ValueError("a packed step with more rows than the step before it")
                batch += before[place : place + item]
                place += item
            else:
                dropped += before[place : place - item]
                place -= item
        dropped += before[place:]
        if touched:
            dropped += [each for each in before if each.row.request_id in touched]
        self._settle(dropped)
        self._chunks = _unfinished(rows)
        if touched:
            for at, each in enumerate(batch):
                if each.since != count and each.row.request_id in touched:
                    row = self._row(each, count)
                    rows.append(row)
                    batch[at] = _Going(row, count)
        self.state.apply(msgspec.structs.replace(record, batch=rows))
        self._count, self._tokens_ns, self._before = count, record.tokens_ns, batch

    def finish(self) -> SessionState:
        """The state after what was taken."""
        self._settle(self._before)
        return self.state

    def _settle(self, going: Iterable[_Going]) -> None:
        """Tell the state where these requests are after the last step."""
        rows = []
        for each in going:
            if each.since != self._count:
                each.row = self._row(each, self._count)
                each.since = self._count
                rows.append(each.row)
        if rows:
            self.state.table.take_rows(rows, self._tokens_ns, Outcome())

    def _row(self, going: _Going, count: int) -> BatchRow:
        """The row of a request in the step `count`: one token more in each step since its last."""
        row = going.row
        num_steps = count - going.since
        start = row.start + row.num_tokens + num_steps - 1
        num_blocks = row.num_blocks
        if self._block_size:
            # A block more in each step whose token has no room, until there is room for all.
            needed = start // self._block_size + 1
            num_blocks = max(num_blocks, min(num_blocks + num_steps, needed))
        return BatchRow(row.request_id, _DECODE, start, 1, 0, num_blocks, _LAST_CHUNK)


def _unfinished(rows: Iterable[BatchRow]) -> set[int]:
    return {row.request_id for row in rows if not row.flags & _LAST_CHUNK}
