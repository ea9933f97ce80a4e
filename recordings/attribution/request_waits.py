"""`RequestWaits`: which requests wait for a token, and what they have waited for so far.

`QueueTime`: what held up the requests in the queue, as pieces of time with one cause each.
"""

import copy
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from operator import attrgetter

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.causes import Piece, merged
from stepscope.recordings.attribution.open_waits import StepSpan, Wait, blocking_reason, wait_of
from stepscope.recordings.attribution.queue import NO_BLOCKS, QueueWait, reasons_of
from stepscope.recordings.state.session import SessionState

_DECODE = int(wire.Phase.DECODE)
_CHUNK_PIECES = 32
_PRUNE_AT = 128  # chunks
_NUM_LAST = 2  # chunks that are kept anyway


class _Chunk:
    """Pieces of time without holes. Long waits share most of their time: it is merged only once."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = self.end_ns = begin_ns
        self.pieces: list[Piece] = []

    @cached_property
    def merged(self) -> tuple[Piece, ...]:
        """The pieces merged, once no more come."""
        return merged(self.pieces)


class QueueTime:
    """What held up the queue, as pieces of time, in order."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._prune_at = _PRUNE_AT

    def add(self, between: list[Piece], span: StepSpan) -> bool:
        """Add a step and the time before it. Returns whether old time should be pruned."""
        ns, detail = span.work_end_ns - span.start_ns, blocking_reason(span.record)
        queued = Piece("queued", span.start_ns, ns, span.record.step, 1, detail)
        chunk = self._chunks[-1] if self._chunks else None
        for piece in (*between, queued, *span.excess):
            if piece.ns <= 0:
                continue
            follows = chunk is not None and chunk.end_ns == piece.start_ns
            if chunk is None or not follows or len(chunk.pieces) == _CHUNK_PIECES:
                chunk = _Chunk(piece.start_ns)
                self._chunks.append(chunk)
            chunk.pieces.append(piece)
            chunk.end_ns = piece.start_ns + piece.ns
        return len(self._chunks) >= self._prune_at

    def since(self, time_ns: int) -> list[Piece]:
        """The pieces of time (one cause each) from a time on. The first may begin earlier."""
        return [piece for chunk in self._chunks[self._place(time_ns) :] for piece in chunk.pieces]

    def cover(self, request: Wait) -> list[Piece]:
        """Explain most of a wait with merged pieces of time. Returns the pieces for the rest."""
        chunks = self._chunks[self._place(request.covered_ns) :]
        for chunk in chunks[:-1]:
            if chunk.begin_ns == request.covered_ns:
                request.pieces += chunk.merged
                request.covered_ns = chunk.end_ns
            else:
                for piece in chunk.pieces:
                    request.add(piece, piece.start_ns + piece.ns)
        return chunks[-1].pieces if chunks else []

    def forget_before(self, time_ns: int) -> None:
        # An arrival during a step is published with the next step, or with the one after it if the
        # next one was already prepared.
        del self._chunks[: min(self._place(time_ns), len(self._chunks) - _NUM_LAST)]
        self._prune_at = len(self._chunks) + _PRUNE_AT

    def _place(self, time_ns: int) -> int:
        first = bisect_right(self._chunks, time_ns, key=attrgetter("begin_ns"))
        return max(0, first - 1)


class RequestWaits:
    """The waits of all requests but those that got a token in the last step.

    Args:
        state: the state of the session, to which others apply the messages.
        only: follow only this request, and store all its time in `life`.
        with_queue: keep each wait in the queue that has ended in `queued`.

    Attributes:
        open: the waits by request id.
        life: all time of the followed request, as pieces with one cause each.
    """

    def __init__(self, state: SessionState, only: int | None, *, with_queue: bool) -> None:
        self.life: list[Piece] = []
        self.has_ended = False  # whether the followed request has ended
        self.queued: list[QueueWait] = []
        self._state = state
        self._only = only
        self._with_queue = with_queue
        self.forget()

    def forget(self) -> None:
        self.open: dict[int, Wait] = {}
        self._waiting: set[int] = set()  # requests that are not admitted
        self._queue = QueueTime()

    def adopt(self, now_ns: int, step: int) -> None:
        """Take over the requests of the state. Known waits are kept unless it contradicts them.

        Of the time before, only the operator's pauses are known.
        """
        before, self.open = self.open, {}
        self._waiting.clear()
        pauses = self._state.pauses
        for request_id, view in self._state.requests.items():
            if view.status == "finished" or self._only not in (None, request_id):
                continue
            wait = wait_of(view)
            known = before.get(request_id)
            if known is not None and known.num_output == wait.num_output:
                known.status, wait = wait.status, known
            if wait.start_ns is not None:
                for start_ns, end_ns in pauses.parts(wait.covered_ns, now_ns):
                    wait.add(Piece("paused", start_ns, end_ns - start_ns, step), end_ns)
            self.open[request_id] = wait
            if wait.status != "running":
                self._waiting.add(request_id)

    def seat(
        self, rows: Sequence[wire.BatchRow], between: Sequence[Piece], start_ns: int, step: int
    ) -> None:
        """Find the waits of requests with rows in a step, before the state applies the rows."""
        waits, running = self.open, self._state.table.running
        for row in rows:
            request_id = row.request_id
            wait = waits.get(request_id)
            if wait is None:
                if row.phase == _DECODE and self._only is None and request_id in running:
                    continue  # its last token came in the step before
                wait = self.wait(request_id)
            if wait.status != "running":  # its admission was not told
                self._leave_queue(request_id, wait, between, start_ns, step)

    def wait(self, request_id: int) -> Wait:
        wait = self.open[request_id] = wait_of(self._state.requests.get(request_id))
        return wait

    def take(
        self, event: wire.RequestEvent, time_ns: int, between: Sequence[Piece], step: int
    ) -> None:
        """Apply an event, before the state does.

        `between`: the time between the previous step and the event, as pieces with one cause each.
        """
        request_id = event.request_id
        if self._only not in (None, request_id):
            return
        view = self._state.requests.get(request_id)
        is_known = request_id in self.open or (view is not None and view.status != "finished")
        if isinstance(event, wire.Arrived):
            if not is_known:
                self._arrive(event, time_ns, step)
        elif not is_known:
            return
        elif isinstance(event, wire.Aborted):
            if self._with_queue and request_id in self._waiting:
                self._leave_queue(request_id, self.open[request_id], between, time_ns, None)
            self.end(request_id)
        elif isinstance(event, wire.Admitted):
            wait = self.open.get(request_id) or self.wait(request_id)
            if wait.status != "running":
                self._leave_queue(request_id, wait, between, time_ns, step)
        elif isinstance(event, wire.Preempted):
            wait = self.open.get(request_id) or self.wait(request_id)
            wait.fill(between, time_ns, step)
            wait.status = "out"
            wait.preempted_for = "" if event.reason in NO_BLOCKS else event.reason
            wait.queued_ns, wait.num_before = time_ns, len(wait.pieces)
            self._waiting.add(request_id)

    def hold(
        self, rows: Sequence[wire.HeldRow], between: Sequence[Piece], time_ns: int, step: int
    ) -> None:
        for row in rows:
            wait = self.open.get(row.request_id)
            if wait is not None and wait.status != "running":
                spans = [*self._queue.since(wait.covered_ns), *between]
                wait.fill(spans, max(time_ns, wait.covered_ns), step)
                wait.held = row.reason

    def _arrive(self, event: wire.Arrived, latest_ns: int, step: int) -> None:
        origin = event.origin
        self._waiting.add(event.request_id)
        if origin is None:
            self.open[event.request_id] = Wait("waiting", event.time_ns)
            return
        wait = Wait("waiting", origin.last_token_ns, origin.num_output_tokens)
        wait.queued_ns = origin.received_ns
        self.open[event.request_id] = wait
        way = "lost" if origin.sent_ns is None else "way"
        for detail, end_ns in (("room", origin.sent_ns or 0), (way, origin.received_ns)):
            piece = Piece("transfer", wait.covered_ns, 0, step, detail=detail)
            wait.add(piece, min(end_ns, latest_ns))
        wait.num_before = len(wait.pieces)

    def _leave_queue(
        self, request_id: int, wait: Wait, between: Sequence[Piece], end_ns: int, step: int | None
    ) -> None:
        """End the wait of a request in the queue; it is admitted by `step` (None: it has ended)."""
        was_out = wait.status == "out"
        if self._only is None and not was_out and not wait.held:
            spans: Collection[Piece] = self._queue.cover(wait)
        else:  # a life keeps single steps, and after a preemption the cause is another one
            spans = self._queue.since(wait.covered_ns)
        wait.fill([*spans, *between], end_ns, self._state.step + 1 if step is None else step)
        wait.status, wait.held = "running", ""
        self._waiting.discard(request_id)
        if self._with_queue:
            self.queued.append(self._queue_wait(request_id, wait, was_out, end_ns, step))

    def waiting(self) -> dict[int, QueueWait]:
        found, now_ns = {}, self._state.time_ns
        for request_id in self._waiting:
            wait = copy.copy(self.open[request_id])
            wait.pieces = wait.pieces.copy()
            pauses = self._state.pauses.parts(wait.covered_ns, now_ns)  # no step follows yet
            step = self._state.step
            paused = [Piece("paused", since, until - since, step) for since, until in pauses]
            wait.fill([*self._queue.since(wait.covered_ns), *paused], now_ns, step)
            found[request_id] = self._queue_wait(request_id, wait, wait.status == "out", None, None)
        return found

    def _queue_wait(
        self, request_id: int, wait: Wait, was_out: bool, end_ns: int | None, step: int | None
    ) -> QueueWait:
        return QueueWait(
            request_id, was_out, wait.queued_ns, end_ns, step,
            reasons_of(wait.pieces[wait.num_before :]), len(self._waiting),
        )  # fmt: skip

    def end_step(self, between: list[Piece], span: StepSpan) -> None:
        """Add a step, and the time before it, to what the queue had to wait for."""
        if self._queue.add(between, span):
            times_ns = [self.open[request_id].covered_ns for request_id in self._waiting]
            self._queue.forget_before(min(times_ns, default=span.end_ns))

    def end(self, request_id: int) -> None:
        wait = self.open.pop(request_id, None)
        self._waiting.discard(request_id)
        if request_id == self._only:
            self.life += [] if wait is None else wait.pieces
            self.has_ended = True
