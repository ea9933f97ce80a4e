"""`RequestWaits`: the requests of an engine, the current wait of each, and the queue."""

from collections.abc import Iterable

from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.wire import (
    Aborted,
    Admitted,
    Arrived,
    Finished,
    Preempted,
    RequestEvent,
    RequestView,
)
from stepscope.recordings.attribution.causes import Piece
from stepscope.recordings.attribution.closed_waits import QueueTime
from stepscope.recordings.attribution.open_waits import StepSpan, Wait, wait_of


class RequestWaits:
    """Tracks which requests wait, from events and snapshots. The `Explainer` finds the causes.

    Args:
        only: follow only this request, and store all its time in `life`.

    Attributes:
        requests: the waits of all requests that have not ended.
        running: the waits of requests that are admitted and not preempted.
        life: all time of the followed request, as pieces with one cause each.
        has_ended: whether the followed request has ended.
    """

    def __init__(self, only: int | None) -> None:
        self.life: list[Piece] = []
        self.has_ended = False
        self._only = only
        self.forget()

    def forget(self) -> None:
        """Forget all requests, because another engine begins."""
        self.requests: dict[int, Wait] = {}
        self.running: dict[int, Wait] = {}
        self._queue = QueueTime()

    def take(self, event: RequestEvent, time_ns: int, between: list[Piece], step: int) -> None:
        """Apply a request event.

        Args:
            between: the time between the previous step and the event, as pieces with one cause
                each.
        """
        request_id = event.request_id
        if self._only is not None and request_id != self._only:
            return
        request = self.requests.get(request_id)
        if isinstance(event, Arrived):
            self.arrive(event, time_ns, step)
        elif isinstance(event, Finished | Aborted):
            self.end(request_id)
        elif request is None:
            return
        elif isinstance(event, Admitted):
            if request.status != "running":
                self.admit(request_id, between, time_ns, step)
        elif isinstance(event, Preempted):
            request.fill(between, time_ns, step)
            request.status = "out"
            self.running.pop(request_id, None)

    def arrive(self, event: Arrived, latest_ns: int, step: int) -> None:
        """Add a request.

        If its arrival time is later than `latest_ns`, that time is used instead.
        """
        request_id, origin = event.request_id, event.origin
        if self._only not in (None, request_id) or request_id in self.requests:
            return
        since_ns, num_output = event.time_ns, 0
        if origin is not None:
            since_ns, num_output = origin.last_token_ns, origin.num_output_tokens
        wait = self.requests[request_id] = Wait(
            event.client_id,
            "waiting",
            min(since_ns, latest_ns),
            event.num_prompt_tokens,
            num_output,
        )
        if origin is not None:
            way = "lost" if origin.sent_ns is None else "way"
            for detail, end_ns in (("room", origin.sent_ns or 0), (way, origin.received_ns)):
                piece = Piece("transfer", wait.covered_ns, 0, step, detail=detail)
                wait.add(piece, min(end_ns, latest_ns))

    def admit(self, request_id: int, between: list[Piece], start_ns: int, step: int) -> None:
        """End the wait in the queue at `start_ns`."""
        request = self.requests[request_id]
        if self._only is None and request.status != "out":
            spans = self._queue.cover(request)
        else:  # a life keeps single steps, and after a preemption the cause is another one
            spans = self._queue.since(request.covered_ns)
        request.fill([*spans, *between], start_ns, step)
        request.status = "running"
        self.running[request_id] = request

    def end(self, request_id: int) -> None:
        request = self.requests.pop(request_id, None)
        self.running.pop(request_id, None)
        if request is not None and self._only is not None:
            self.life += request.pieces
            self.has_ended = True

    def end_step(self, between: list[Piece], span: StepSpan) -> None:
        """Add a step, and the time before the step, to what the queue had to wait for."""
        if len(self.requests) == len(self.running):
            self._queue.restart(between, span)
        elif self._queue.add(between, span):
            self._prune()

    def adopt(self, views: Iterable[RequestView]) -> None:
        """Take over the requests of a snapshot. Known waits are kept unless it contradicts them."""
        before, self.requests, self.running = self.requests, {}, {}
        for view in views:
            request_id = view.request_id
            if view.status == "finished" or self._only not in (None, request_id):
                continue
            known = before.get(request_id)
            if known is None or known.num_output != view.num_output_tokens:
                known = wait_of(view)
            known.status = "out" if view.status == "preempted" else "waiting"
            if view.status == "running":
                known.status = "running"
                self.running[request_id] = known
            self.requests[request_id] = known

    def cover_pauses(self, pauses: PauseTrail, until_ns: int, step: int) -> None:
        """Account for an operator's pauses in waits that began before they were observed.

        Of that time, only the pauses are known.
        """
        if not pauses.spans:
            return
        for wait in self.requests.values():
            if wait.start_ns is not None:
                for start_ns, end_ns in pauses.parts(wait.covered_ns, until_ns):
                    wait.add(Piece("paused", start_ns, end_ns - start_ns, step), end_ns)

    def _prune(self) -> None:
        """Drop time of the queue that lies before the wait of every request in it."""
        waiting = [wait for wait in self.requests.values() if wait.status != "running"]
        self._queue.forget_before(min((wait.covered_ns for wait in waiting), default=0))
