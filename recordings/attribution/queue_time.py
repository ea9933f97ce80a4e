"""`QueueTime`: what held up the requests in the queue, as pieces of time with one cause each."""

from bisect import bisect_right
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from stepscope.recordings.attribution.causes import Piece, merged
from stepscope.recordings.attribution.open_waits import StepSpan, Wait, blocking_reason

_PRUNE_AT = 4096
_CHUNK_PIECES = 32
# The engine publishes an arrival during a step with the next step, or with the one after it if the
# next one was already prepared.
_NUM_LAST = 2


class _WaitChunk(NamedTuple):
    """Consecutive pieces (parts of a wait), merged where they have the same cause and details."""

    pieces: tuple[Piece, ...]
    begin_ns: int
    end_ns: int
    is_whole: bool  # the pieces leave no hole


class QueueTime:
    """The pieces of time, in order.

    Long waits share most of their time, so the pieces of that time are merged only once.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._num_forgotten = 0
        self._prune_at = _PRUNE_AT
        self._chunks: dict[int, _WaitChunk] = {}
        # The last steps and the time before each, not yet turned into pieces.
        self._last: deque[tuple[list[Piece], StepSpan]] = deque(maxlen=_NUM_LAST)

    def restart(self, between: list[Piece], span: StepSpan) -> None:
        """Drop all time before a step in which no request waited.

        Keeps this step and the previous step, because arrivals during them are published later.
        """
        self._last.append((between, span))
        if self._pieces and len(self._last) == _NUM_LAST:
            self._pieces.clear()
            self._chunks.clear()
            self._num_forgotten = 0
            self._prune_at = _PRUNE_AT

    def add(self, between: list[Piece], span: StepSpan) -> bool:
        """Add a step and the time before it. Returns whether old time should be pruned."""
        self._begin()
        self._pieces += between
        self._pieces += _spent(span)
        return len(self._pieces) >= self._prune_at

    def since(self, time_ns: int) -> list[Piece]:
        """The pieces of time (one cause each) from a time on. The first may begin earlier."""
        self._begin()
        return self._pieces[self._place(time_ns) :]

    def cover(self, request: Wait) -> list[Piece]:
        """Explain most of a request's wait with merged pieces of time.

        Returns the pieces for the rest.
        """
        self._begin()
        place = self._place(request.covered_ns)
        first = -(-(place + self._num_forgotten) // _CHUNK_PIECES)
        last = (len(self._pieces) + self._num_forgotten) // _CHUNK_PIECES
        if first >= last:
            return self._pieces[place:]
        begin = first * _CHUNK_PIECES - self._num_forgotten
        _add(request, self._pieces[place:begin])
        for number in range(first, last):
            begin = number * _CHUNK_PIECES - self._num_forgotten
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = _chunk(self._pieces[begin : begin + _CHUNK_PIECES])
                self._chunks[number] = chunk
            if chunk.is_whole and chunk.begin_ns == request.covered_ns:
                request.pieces += chunk.pieces
                request.covered_ns = chunk.end_ns
            else:
                _add(request, self._pieces[begin : begin + _CHUNK_PIECES])
        return self._pieces[begin + _CHUNK_PIECES :]

    def forget_before(self, time_ns: int) -> None:
        place = self._place(time_ns)
        del self._pieces[:place]
        self._num_forgotten += place
        self._prune_at = len(self._pieces) + _PRUNE_AT
        first = -(-self._num_forgotten // _CHUNK_PIECES)
        self._chunks = {at: chunk for at, chunk in self._chunks.items() if at >= first}

    def _begin(self) -> None:
        for between, span in self._last:
            self._pieces += between
            self._pieces += _spent(span)
        self._last.clear()

    def _place(self, time_ns: int) -> int:
        first = bisect_right(self._pieces, time_ns, key=attrgetter("start_ns"))
        return max(0, first - 1)


def _spent(span: StepSpan) -> list[Piece]:
    ns, detail = span.work_end_ns - span.start_ns, blocking_reason(span.record)
    queued = Piece("queued", span.start_ns, ns, span.record.step, 1, detail)
    return [queued, *span.excess]


def _chunk(pieces: list[Piece]) -> _WaitChunk:
    ends_ns = [piece.start_ns + piece.ns for piece in pieces]
    is_whole = all(
        piece.ns > 0 and end_ns == after.start_ns
        for piece, end_ns, after in zip(pieces, ends_ns, pieces[1:], strict=False)
    )
    return _WaitChunk(
        merged(pieces), pieces[0].start_ns, ends_ns[-1], is_whole and pieces[-1].ns > 0
    )


def _add(request: Wait, pieces: list[Piece]) -> None:
    for piece in pieces:
        request.add(piece, piece.start_ns + piece.ns)
