"""`Explainer`: follows every wait for a token in a session, and finds out why some were long.

How long each wait was is what `SessionState` makes of the messages. For the waits that are not over
with the next step, and for the late ones, the explainer divides the time since the last token (or
the arrival) into pieces with one cause each, without holes or overlaps. Time that no record
accounts for becomes an `unknown` piece. So the pieces of a wait always sum to the wait.

Requests that decode in every step cost nothing here.
"""

import math
from collections.abc import Sequence

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.attribution import open_waits
from stepscope.recordings.attribution.baseline import Baseline, MemoryBaseline, SlowStep, work_of
from stepscope.recordings.attribution.causes import Late, Piece, merged
from stepscope.recordings.attribution.request_waits import RequestWaits
from stepscope.recordings.state.clocks import known_since, leave_out
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState

_DECODE = int(wire.Phase.DECODE)
_LAST_CHUNK = int(wire.RowFlag.LAST_CHUNK)


class Explainer:
    """Processes the messages of a session in order and adds explained waits to `late`.

    Args:
        itl_bound_ns, ttft_bound_ns: a longer wait is late.
        only: follow only this request, and store all its pieces in `waits.life`.
        state: the state right after the last step before the first message; it is copied.
        since_ns: leave out waits that began earlier, because an operator may have paused the engine
            then. 0: none. None: taken from `state` or the first snapshot.
        baseline: finds slow steps; None: no step counts as slow.
        learns: a baseline to which each step is added after the step was judged. It may be
            `baseline` itself.
        with_queue: keep each wait in the queue that has ended in `waits.queued`.

    Attributes:
        state: the state after the last message, without blocks.
        waits: the waits that are in progress.
        since_ns: waits that began before it are left out.
    """

    def __init__(
        self,
        itl_bound_ns: float,
        ttft_bound_ns: float,
        only: int | None = None,
        state: SessionState | None = None,
        *,
        since_ns: int | None = None,
        baseline: Baseline | MemoryBaseline | None = None,
        after_slow: bool = False,
        learns: Baseline | None = None,
        with_queue: bool = False,
    ) -> None:
        self.late: list[Late] = []
        self.num_steps = 0
        self.first_step_ns: int | None = None  # start of the very first step
        self.itl_bound_ns = itl_bound_ns
        self.ttft_bound_ns = ttft_bound_ns
        self._baseline = baseline
        self._learns = learns
        self.only = only
        self.state = SessionState() if state is None else state.copy_without_blocks()
        self.waits = RequestWaits(self.state, only, with_queue=with_queue)
        if not math.isinf(itl_bound_ns):
            self.state.table.late_ns = math.floor(itl_bound_ns)
        self._step: int | None  # the last one
        self._end_ns: int | None  # of the last step
        self._begin()
        if state is not None:
            self._step, self._end_ns = state.step, state.time_ns
            self.since_ns = state.time_ns if since_ns is None else since_ns
            self.waits.adopt(state.time_ns, state.step)
            self._needs_snapshot = False
            self._was_slow = after_slow

    def _begin(self) -> None:
        self._step = self._end_ns = None
        self._last_record: int | None = None
        self.waits.forget()
        self.since_ns = 0
        self._is_lost = False
        self._needs_snapshot = True
        self._was_slow = False  # the last step

    def take(self, message: wire.Telemetry, lost: bool = False) -> Outcome | None:
        """Process the next message. Returns the outcome of a step that is not repeated, else None.

        Its waits are without the operator's pauses, and without waits of unknown length.
        """
        if lost:
            self._is_lost = self._needs_snapshot = True
        outcome = None
        if isinstance(message, wire.StepRecord):
            if not self.is_repeated(message):
                outcome = self._take_step(message)
                self._is_lost = False
        elif isinstance(message, wire.EngineStatus):
            self._take_status(message)
        elif isinstance(message, wire.Snapshot):
            self._take_snapshot(message)
        else:
            if self.state.is_replaced_by(message):
                self._begin()
            self.state.apply(message)
        self.state.blocks = None
        return outcome

    def is_repeated(self, record: wire.StepRecord) -> bool:
        """Whether a step was taken already: a publisher may repeat it under a new number."""
        return self._last_record is not None and record.step <= self._last_record

    # Messages between steps

    def _take_status(self, status: wire.EngineStatus) -> None:
        if self._step is None:  # an engine publishes its status between two steps
            self._step, self._end_ns = status.step, status.time_ns
        if status.events or status.held:
            time_ns = max(status.time_ns, self._end_ns or 0)
            pauses = self.state.pauses.after(status)
            between = self._between(status.step + 1, time_ns, pauses)
            for event in status.events:
                self.waits.take(event, time_ns, between, status.step + 1)
                if isinstance(event, wire.Finished):
                    self.waits.end(event.request_id)
            self.waits.hold(status.held or (), between, time_ns, status.step + 1)
        self.state.apply(status)

    def _take_snapshot(self, snapshot: wire.Snapshot) -> None:
        if self.state.is_replaced_by(snapshot):
            self._begin()
        if not self._needs_snapshot:  # it holds nothing new
            self.state.pauses = self.state.pauses.after(snapshot)
            return
        self.state.apply(snapshot)
        if self._step is None:  # nothing came before it
            self.since_ns = known_since(snapshot)
            self._step, self._end_ns = snapshot.step, snapshot.time_ns
        self.waits.adopt(snapshot.time_ns, snapshot.step)
        self._needs_snapshot = False

    # Steps

    def _take_step(self, record: wire.StepRecord) -> Outcome:
        self.num_steps += 1
        if self.first_step_ns is None:
            self.first_step_ns = record.schedule_start_ns
        start_ns = max(record.schedule_start_ns, self._end_ns or 0)
        end_ns = max(record.tokens_ns, start_ns)
        if self.state.is_summed_up:  # what the engine did meanwhile is not known
            start_ns = end_ns
        between = self._between(record.step, start_ns, self.state.pauses.after(record))
        between = open_waits.with_hold_ups(between, record)
        for load in open_waits.loads_of(record, start_ns):
            between.append(load)
            start_ns += load.ns
        prefills = open_waits.prefills_of(record)
        slow = self._slow_step(record, prefills, end_ns - start_ns)
        self._was_slow = slow is not None
        span = open_waits.span_of(record, prefills, slow, start_ns, end_ns)
        rows = record.batch
        if rows is not None and self.only is not None:
            rows = [row for row in rows if row.request_id == self.only]
        for event in record.events:
            # A request may have come while the step ran.
            time_ns = end_ns if isinstance(event, wire.Arrived) else start_ns
            self.waits.take(event, time_ns, between, record.step)
        if rows is not None:
            self.waits.seat(rows, between, start_ns, record.step)
        if record.held:
            self.waits.hold(record.held, between, start_ns, record.step)
        outcome = self.state.take_step(record, rows)
        if rows is not None:
            self._take_rows(rows, outcome, span, between, prefills)
        self.waits.end_step(between, span)
        for event in record.events:
            if isinstance(event, wire.Finished):
                self.waits.end(event.request_id)
        self._step = self._last_record = record.step
        self._end_ns = end_ns
        leave_out(outcome, self.state, record.tokens_ns, self.since_ns)
        if self.only is not None:  # events tell of all requests
            outcome.ttft_ns = [each for each in outcome.ttft_ns if each[0] == self.only]
            outcome.tpot_ns = [each for each in outcome.tpot_ns if each[0] == self.only]
            outcome.e2e_ns = [each for each in outcome.e2e_ns if each[0] == self.only]
        return outcome

    def _slow_step(
        self, record: wire.StepRecord, prefills: Sequence[wire.BatchRow], ns: int
    ) -> SlowStep | None:
        if (work := work_of(record, prefills)) is None:
            return None
        slow = None
        if self._baseline is not None:
            slow = self._baseline.slow_step(work, ns, after_slow=self._was_slow, step=record.step)
        if self._learns is not None:
            self._learns.add(work, ns)
        return slow

    def _between(self, step: int, start_ns: int, pauses: PauseTrail) -> list[Piece]:
        begin_ns = self._end_ns
        if begin_ns is None or begin_ns >= start_ns:
            return []
        if self.state.is_summed_up:
            return [Piece("unknown", begin_ns, start_ns - begin_ns, step, detail="untold")]
        if self._is_lost or self._step is None or step != self._step + 1:
            return [Piece("unknown", begin_ns, start_ns - begin_ns, step)]
        had_work = self.state.num_running + self.state.num_waiting > 0
        return open_waits.without_step(pauses, begin_ns, start_ns, step, had_work=had_work)

    def _take_rows(
        self,
        rows: Sequence[wire.BatchRow],
        outcome: Outcome,
        span: open_waits.StepSpan,
        between: Sequence[Piece],
        prefills: list[wire.BatchRow],
    ) -> None:
        record, start_ns, waits = span.record, span.start_ns, self.waits.open
        late = {each: ns for each, ns in outcome.late_gaps if ns > self.itl_bound_ns}
        late.update([each for each in outcome.ttft_ns if each[1] > self.ttft_bound_ns])
        if late or waits:
            alike: dict[int, tuple[Piece, ...]] = {}  # start of a wait -> its pieces
            for row in rows:
                wait = waits.get(row.request_id)
                late_ns = late.get(row.request_id)
                if wait is None and late_ns is None:
                    continue
                began_ns = None if late_ns is None else record.tokens_ns - late_ns
                if wait is None and began_ns is not None and began_ns in alike:
                    # Requests that decode side by side share their waits.
                    self._add_late(row, began_ns, span, alike[began_ns])
                    continue
                is_shared = wait is None
                if wait is None or (began_ns is not None and wait.start_ns != began_ns):
                    wait = open_waits.Wait("running", began_ns)
                wait.fill(between, start_ns, record.step)
                piece = open_waits.own(row, record, prefills, span.load, start_ns)
                if piece.cause == "recompute" and wait.preempted_for:
                    piece = piece._replace(detail=wait.preempted_for)
                wait.add_step(piece, span)
                if row.phase != _DECODE and not row.flags & _LAST_CHUNK:
                    continue
                waits.pop(row.request_id, None)
                if self.only is not None:
                    self.waits.life += wait.pieces
                if began_ns is not None:
                    pieces = merged(wait.pieces)
                    if is_shared:
                        alike[began_ns] = pieces
                    self._add_late(row, began_ns, span, pieces)
        running = self.state.table.running
        if self.only is not None:
            running = running & {self.only}
        if len(rows) < len(running) or record.events:  # a request with a row may have ended
            piece = open_waits.left_out(record, prefills, start_ns)
            for request_id in running.difference([row.request_id for row in rows]):
                wait = waits.get(request_id) or self.waits.wait(request_id)
                wait.fill(between, start_ns, record.step)
                wait.add_step(piece, span)

    def _add_late(
        self,
        row: wire.BatchRow,
        began_ns: int,
        span: open_waits.StepSpan,
        pieces: tuple[Piece, ...],
    ) -> None:
        if began_ns < self.since_ns:
            return
        view = self.state.requests[row.request_id]
        num_tokens = row.num_tokens if row.phase == _DECODE else 1
        token_idx = row.start + row.num_tokens + 1 - view.num_prompt_tokens - num_tokens
        bound_ns = self.itl_bound_ns if token_idx else self.ttft_bound_ns
        self.late.append(
            Late(
                row.request_id,
                view.client_id,
                token_idx,
                span.record.step,
                began_ns,
                span.end_ns,
                round(bound_ns),
                pieces,
            )
        )
