"""`Explainer`: finds out from the records of a session why a token was late.

For every request, it divides the time since its last token (or its arrival) into pieces with one
cause each, without holes or overlaps. Time that no record accounts for becomes an `unknown` piece.
So the pieces of a wait always sum to the wait.

Requests that decode in every step cost almost nothing, because only waits above the bound are
examined.
"""

from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.wire import (
    Arrived,
    BatchRow,
    EngineInfo,
    EngineStatus,
    Finished,
    Phase,
    RowFlag,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.attribution.baseline import Baseline, MemoryBaseline, SlowStep, work_of
from stepscope.recordings.attribution.causes import Piece, merged
from stepscope.recordings.attribution.closed_waits import ClosedWaits
from stepscope.recordings.attribution.open_waits import (
    StepSpan,
    Wait,
    left_out,
    loads_of,
    own,
    prefills_of,
    span_of,
    without_step,
)
from stepscope.recordings.attribution.request_waits import RequestWaits
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.session import SessionState

_DECODE = int(Phase.DECODE)
_NO_STEP = frozenset(("between", "idle"))
_LAST_CHUNK = int(RowFlag.LAST_CHUNK)


class Explainer:
    """Processes the messages of a session in order and adds explained waits to `late`.

    Args:
        itl_bound_ns, ttft_bound_ns: a longer wait is late.
        only: follow only this request, and store all its pieces in `life`.
        state: the state right after the last step before the first message.
        since_ns: leave out waits that began earlier, because an operator may have paused the engine
            then. None: taken from `state` or the first snapshot.
        with_begun: do not leave out those waits.
        baseline: finds slow steps; None: no step counts as slow.
        after_slow: whether the last step of `state` was slow.
        learns: a baseline to which each step is added after the step was judged. It may be
            `baseline` itself.
    """

    def __init__(
        self,
        itl_bound_ns: float,
        ttft_bound_ns: float,
        only: int | None = None,
        state: SessionState | None = None,
        *,
        since_ns: int | None = None,
        with_begun: bool = False,
        baseline: Baseline | MemoryBaseline | None = None,
        after_slow: bool = False,
        learns: Baseline | None = None,
    ) -> None:
        self._baseline = baseline
        self._learns = learns
        self._closed_waits = ClosedWaits(itl_bound_ns, ttft_bound_ns)
        self.late = self._closed_waits.late
        # Wait -> tokens, without the operator's pauses:
        self.itl_counts = self._closed_waits.itl_counts
        self.ttft_counts = self._closed_waits.ttft_counts
        self.num_steps = 0
        self.first_step_ns: int | None = None  # start of the very first step
        self._only = only
        self._request_waits = RequestWaits(only)
        self._with_begun = with_begun
        self._engine_id: str | None
        self._step: int | None  # the last one
        self._end_ns: int | None  # of the last step
        self._begin()
        if state is not None:
            self._engine_id = None if state.info is None else state.info.engine_id
            self._step, self._end_ns = state.step, state.time_ns
            self._pauses = state.pauses
            self._known_since(state.time_ns if since_ns is None else since_ns)
            self._request_waits.adopt(state.requests.values())
            self._request_waits.cover_pauses(self._pauses, state.time_ns, state.step)
            self._needs_snapshot = False
            self._had_work = state.num_running + state.num_waiting > 0
            self._was_slow = after_slow

    def _begin(self) -> None:
        self._engine_id = None
        self._step = None
        self._end_ns = None
        self._request_waits.forget()
        self._pauses = PauseTrail()
        self._since_ns = 0  # nothing before this is known
        self._is_lost = False
        self._needs_snapshot = True
        self._had_work = False  # as of the last message
        self._was_slow = False  # the last step

    def take(self, message: Telemetry, lost: bool = False) -> None:
        """Process the next message.

        Args:
            lost: whether messages before it are missing.
        """
        if lost:
            self._is_lost = self._needs_snapshot = True
        if isinstance(message, StepRecord):
            self._pauses = self._pauses.after(message)
            self._take_step(message)
            self._is_lost = False
        elif isinstance(message, EngineStatus):
            self._pauses = self._pauses.after(message)
            if self._step is None:  # an engine publishes its status between two steps
                self._step, self._end_ns = message.step, message.time_ns
            time_ns = max(message.time_ns, self._end_ns or 0)
            between = self._between(message.step + 1, time_ns)
            for event in message.events:
                self._request_waits.take(event, time_ns, between, message.step + 1)
            self._had_work = message.num_running + message.num_waiting > 0
        elif isinstance(message, Snapshot):
            self._meet(message.info)
            self._pauses = self._pauses.after(message)
            if self._needs_snapshot:
                if self._step is None:  # nothing came before it
                    self._known_since(known_since(message))
                    self._pauses = PauseTrail.of(message)
                    self._step, self._end_ns = message.step, message.time_ns
                    self._had_work = any(view.status != "finished" for view in message.requests)
                self._request_waits.adopt(message.requests)
                self._request_waits.cover_pauses(self._pauses, message.time_ns, message.step)
                self._needs_snapshot = False
        elif isinstance(message, EngineInfo):
            self._meet(message)

    @property
    def life(self) -> list[Piece]:
        """All time of the followed request since its arrival, as pieces with one cause each."""
        return self._request_waits.life

    @property
    def has_ended(self) -> bool:
        """Whether the followed request has ended."""
        return self._request_waits.has_ended

    def _known_since(self, time_ns: int) -> None:
        if not self._with_begun:
            self._since_ns = time_ns

    # Steps

    def _take_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        if self.first_step_ns is None:
            self.first_step_ns = record.schedule_start_ns
        before_ns = self._end_ns
        start_ns = max(record.schedule_start_ns, before_ns or 0)
        end_ns = max(record.tokens_ns, start_ns)
        between = self._between(record.step, start_ns)
        for load in loads_of(record, start_ns):
            between.append(load)
            start_ns += load.ns
        request_waits = self._request_waits
        for event in record.events:
            if isinstance(event, Arrived):  # may have come while the step ran
                request_waits.arrive(event, end_ns, record.step)
            elif not isinstance(event, Finished):
                request_waits.take(event, start_ns, between, record.step)
        prefills = prefills_of(record)
        slow = self._slow_step(record, prefills, end_ns - start_ns)
        self._was_slow = slow is not None
        span = span_of(record, slow, start_ns, end_ns)
        if record.batch is not None:
            self._take_rows(span, between, prefills)
        request_waits.end_step(between, span)
        for event in record.events:
            if isinstance(event, Finished):
                request_waits.end(event.request_id)
        self._step, self._end_ns = record.step, end_ns
        self._had_work = record.num_running + record.num_waiting > 0

    def _slow_step(self, record: StepRecord, prefills: list[BatchRow], ns: int) -> SlowStep | None:
        """Duration and baseline of a step if it was slow; else None."""
        if self._baseline is None and self._learns is None:
            return None
        work = work_of(record, prefills)
        if work is None:
            return None
        slow = None
        if self._baseline is not None:
            slow = self._baseline.slow_step(work, ns, after_slow=self._was_slow, step=record.step)
        if self._learns is not None:
            self._learns.add(work, ns)
        return slow

    def _between(self, step: int, start_ns: int) -> list[Piece]:
        """The time between the previous step and this one, divided into pieces by cause."""
        begin_ns = self._end_ns
        if begin_ns is None or begin_ns >= start_ns:
            return []
        if self._is_lost or self._step is None or step != self._step + 1:
            return [Piece("unknown", begin_ns, start_ns - begin_ns, step)]
        return without_step(self._pauses, begin_ns, start_ns, step, had_work=self._had_work)

    def _take_rows(self, span: StepSpan, between: list[Piece], prefills: list[BatchRow]) -> None:
        record, start_ns, end_ns = span.record, span.start_ns, span.end_ns
        step, only, request_waits = record.step, self._only, self._request_waits
        requests, running = request_waits.requests, request_waits.running
        since_ns = self._since_ns
        is_plain = only is None and all(each.cause in _NO_STEP for each in between)
        seated = {}
        alike: dict[int, tuple[Piece, ...]] = {}  # start of a wait -> its pieces
        for row in record.batch or ():
            request_id = row.request_id
            if only is not None and request_id != only:
                continue
            seated[request_id] = row
            request = requests.get(request_id)
            if request is None:
                request = requests[request_id] = Wait("", "running", None, row.start, 0)
                running[request_id] = request
            if request.status != "running":
                request_waits.admit(request_id, between, start_ns, step)
            is_decode = row.phase == _DECODE
            if is_decode and is_plain and not request.pieces and request.start_ns is not None:
                num_output = row.start + row.num_tokens + 1 - request.num_prompt
                gap_ns = end_ns - request.start_ns
                is_next = num_output == request.num_output + 1 and request.num_output
                if is_next and request.start_ns >= since_ns:
                    if self._closed_waits.count(request, gap_ns, end_ns):
                        # Requests that decode side by side share their waits.
                        pieces = alike.get(request.start_ns)
                        if pieces is None:
                            wait = Wait("", "running", request.start_ns, 0, 0)
                            wait.fill(between, start_ns, step)
                            wait.add_step(own(row, record, prefills, start_ns), span)
                            pieces = alike[request.start_ns] = merged(wait.pieces)
                        self._closed_waits.add_late(request_id, request, step, end_ns, pieces)
                    request.num_output = num_output
                    request.start_ns = request.covered_ns = end_ns
                    continue
            request.fill(between, start_ns, step)
            request.add_step(own(row, record, prefills, start_ns), span)
            if is_decode or row.flags & _LAST_CHUNK:
                self._close(request_id, request, row, step, end_ns)
        if len(seated) < len(running):
            piece = left_out(record, prefills, start_ns)
            for request_id, request in running.items():
                if request_id not in seated:
                    request.fill(between, start_ns, step)
                    request.add_step(piece, span)

    def _close(self, request_id: int, request: Wait, row: BatchRow, step: int, end_ns: int) -> None:
        """End the wait of a request whose token has come, and begin the wait for its next token."""
        if request.start_ns is None and row.phase != _DECODE:
            request.num_prompt = row.start + row.num_tokens
        num_output = row.start + row.num_tokens + 1 - request.num_prompt
        start_ns = request.start_ns
        # After lost steps this may not be the next token: those between are unknown.
        is_next = num_output == request.num_output + 1
        if is_next and start_ns is not None and start_ns >= self._since_ns:
            paused_ns = sum(piece.ns for piece in request.pieces if piece.cause == "paused")
            if self._closed_waits.count(request, end_ns - start_ns - paused_ns, end_ns):
                pieces = merged(request.pieces)
                self._closed_waits.add_late(request_id, request, step, end_ns, pieces)
        if self._only is not None:
            self._request_waits.life += request.pieces
        request.pieces = []
        request.num_output = num_output
        request.start_ns = request.covered_ns = end_ns

    # Rest

    def _meet(self, info: EngineInfo) -> None:
        if self._engine_id is not None and info.engine_id != self._engine_id:
            self._begin()
        self._engine_id = info.engine_id
