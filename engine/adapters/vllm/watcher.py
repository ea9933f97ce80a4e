"""`Watcher`: makes step records of what vLLM schedules and finishes.

vLLM may have two steps in flight. Steps are published in order: what a step did to
requests and blocks is applied when that step ends, and a row of a request that had ended by then
counts as wasted.
"""

import time
from collections import deque
from time import monotonic_ns

from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.block_books import BlockBooks
from stepscope.engine.adapters.vllm.rows import (
    drop_ended,
    gives_first_token,
    gives_token,
    make_rows,
    num_tokens_of,
    running_row,
)
from stepscope.engine.adapters.vllm.settlement import Settlement
from stepscope.engine.adapters.vllm.shapes import SchedulerOutput, VllmRequest, VllmScheduler
from stepscope.engine.adapters.vllm.tracked import TrackedRequest
from stepscope.engine.adapters.vllm.unfinished_step import Row, UnfinishedStep
from stepscope.engine.protocol.wire import (
    Aborted,
    Arrived,
    BlockMove,
    Finished,
    FirstToken,
    KVCounts,
    RequestEvent,
    RequestView,
)
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.telemetry.step_watcher import StepUnderWay


class Watcher:
    """Used only under the attachment's lock.

    Attributes:
        next_step: number of the next step that vLLM schedules.
        published_step: the last step that was published, -1 before the first.
        knobs_version: published with each step that is scheduled.
        books: None where vLLM frees blocks that no output names.
        has_unpublished: something happened that no message has said.
    """

    def __init__(self, scheduler: VllmScheduler) -> None:
        self._scheduler = scheduler
        self._queues = versions.queues(scheduler)
        knows_blocks = versions.knows_blocks(scheduler)
        self.books = BlockBooks(scheduler.kv_cache_manager.block_pool) if knows_blocks else None
        self._settlement = Settlement(
            self.books, bool(scheduler.cache_config.enable_prefix_caching)
        )
        self._table: dict[str, TrackedRequest] = {}
        self._in_flight: deque[UnfinishedStep] = deque()
        self._arrivals: list[RequestEvent] = []
        self._ends: list[RequestEvent] = []
        self._moves: list[BlockMove] = []
        self._last_to_sift = -1  # steps after this one have no rows of ended requests
        self._next_id = 0
        self._tokens_ns = 0
        self.next_step = 0
        self.published_step = -1
        self.knobs_version = 0
        self.has_unpublished = False

    # What vLLM does

    def added(self, request: VllmRequest) -> None:
        """A request has come; a further turn of a known one is no arrival."""
        if request.request_id in self._table:
            return
        now_ns = monotonic_ns()
        # Their clock is the wall clock of another process.
        arrival_ns = min(now_ns, int(request.arrival_time * 1e9) - (time.time_ns() - now_ns))
        tracked = TrackedRequest(self._next_id, request, arrival_ns)
        self._next_id += 1
        self._table[request.request_id] = tracked
        self._arrivals.append(
            Arrived(
                request_id=tracked.request_id,
                client_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                priority=request.priority,
                time_ns=arrival_ns,
            )
        )
        self.has_unpublished = True

    def scheduled(self, out: SchedulerOutput, start_ns: int, end_ns: int, budget: int) -> None:
        """`schedule()` has returned.

        Args:
            budget: tokens that this step could have had.
        """
        total = out.total_num_scheduled_tokens
        preempted = out.preempted_req_ids
        if not total and not preempted:
            return
        scheduler = self._scheduler
        step = UnfinishedStep(
            out,
            self.next_step if total else None,
            start_ns,
            end_ns,
            self.knobs_version,
            budget,
            versions.num_seats(scheduler),
        )
        if preempted:
            step.note_preempted(self._table, preempted)
        step.note_blocks(self._table, scheduler.block_size)
        make_rows(step, self._table)
        step.num_running = len(scheduler.running)
        step.num_waiting = self.num_waiting
        if step.num_waiting:
            step.waiting_reasons = self._waiting_reasons(step, total)
        self._in_flight.append(step)
        if total:
            self.next_step += 1

    def updated(self, out: SchedulerOutput, tokens_ns: int, num_dropped: int) -> StepDraft | None:
        """`update_from_output` has returned: the record of that step, None if it ran nothing.

        Args:
            tokens_ns: when it was called.
            num_dropped: messages that subscribers missed so far.
        """
        ended_now = self.note_ended()
        step = self._take_from_flight(out)
        if step is None:
            return None
        events = self._settlement.settle(step, ended_now)
        assert step.number is not None
        num_wasted = drop_ended(step, ended_now) if step.number <= self._last_to_sift else 0
        self._note_tokens(step.rows, tokens_ns, events)
        events = [*self._arrivals, *events, *self._ends]
        self._arrivals, self._ends = [], []
        kv, moves = self._settlement.drain()
        is_ahead = step.start_ns < self._tokens_ns
        not_before_ns = self._tokens_ns
        self._tokens_ns = tokens_ns
        self.published_step = step.number
        self.has_unpublished = False
        return StepDraft(
            step=step.number,
            schedule_start_ns=max(step.start_ns, not_before_ns),
            schedule_end_ns=max(step.end_ns, not_before_ns),
            tokens_ns=tokens_ns,
            knobs_version=step.knobs_version,
            token_budget=step.token_budget,
            max_num_seqs=step.num_seats,
            num_prefill_tokens=step.num_prefill_tokens,
            num_decode_tokens=(
                out.total_num_scheduled_tokens - num_wasted - step.num_prefill_tokens
            ),
            num_padded_tokens=None,
            batch=step.batch,
            kv=kv,
            moves=moves,
            num_running=max(0, step.num_running - len(ended_now)),
            num_waiting=step.num_waiting,
            waiting_reasons=step.waiting_reasons,
            events=events,
            num_dropped=num_dropped,
            hidden_ns=step.end_ns - step.start_ns if is_ahead else None,
            num_wasted_tokens=num_wasted or None,
        )

    def note_ended(self) -> set[TrackedRequest]:
        """Requests that vLLM has ended since the last call."""
        finished = self._scheduler.finished_req_ids
        if not finished:
            return set()
        found = [self._table.pop(name) for name in list(finished) if name in self._table]
        found.sort(key=lambda tracked: tracked.request_id)
        for tracked in found:
            tracked.ended = True
            self._ends.append(_end_of(tracked))
            self._settlement.release(tracked)
            self._last_to_sift = self.next_step - 1
            self.has_unpublished = True
        return set(found)

    def forgot_cache(self) -> None:
        """vLLM has reset its prefix cache."""
        if self.books is not None:
            self.books.check_cached()
            self.has_unpublished = True

    # Outside of a step

    def drain_events(self) -> list[RequestEvent]:
        """What happened to requests and is not published yet, in order."""
        events = self._arrivals + self._ends
        self._arrivals, self._ends = [], []
        self.has_unpublished = False
        return events

    def counts(self) -> KVCounts | None:
        """Blocks as they are published next; `drain_moves` has the changes."""
        kv, moves = self._settlement.drain()
        self._moves += moves
        return kv

    def drain_moves(self) -> list[BlockMove]:
        """Of the last `counts`."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def num_waiting(self) -> int:
        return versions.num_waiting(self._scheduler, self._queues)

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The oldest step that vLLM has not finished."""
        step = next((each for each in self._in_flight if each.number is not None), None)
        if step is None or step.number is None:
            return None
        rows = [running_row(row) for row in step.rows]
        since_ns = max(step.start_ns, self._tokens_ns)
        return StepUnderWay(step.number, since_ns, rows, step.token_budget)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self.num_waiting or self._in_flight)

    def views(self) -> list[RequestView]:
        """All requests that have not ended, as published."""
        num_in_flight: dict[int, int] = {}
        for step in self._in_flight:
            for row in step.rows:
                request_id = row[0].request_id
                num_in_flight[request_id] = num_in_flight.get(request_id, 0) + num_tokens_of(row)
        return [
            tracked.view(num_in_flight.get(tracked.request_id, 0))
            for tracked in self._table.values()
        ]

    # Of one step

    def _waiting_reasons(self, step: UnfinishedStep, total: int) -> dict[str, int]:
        scheduler, num_waiting = self._scheduler, step.num_waiting
        if step.preempted:
            return {"preemption": num_waiting}
        if len(scheduler.running) >= step.num_seats:
            return {"seats": num_waiting}
        if total >= step.token_budget:
            return {"budget": num_waiting}
        num_deferred = min(num_waiting, versions.num_deferred(scheduler))
        rest = num_waiting - num_deferred
        reasons = {"deferred": num_deferred, "kv_blocks": min(1, rest), "queued": max(0, rest - 1)}
        return {reason: count for reason, count in reasons.items() if count}

    def _take_from_flight(self, out: SchedulerOutput) -> UnfinishedStep | None:
        """The step of `out`; steps that ran nothing are published with it."""
        in_flight = self._in_flight
        while in_flight:
            step = in_flight[0]
            if step.out is not out and step.number is not None:
                raise RuntimeError("vLLM finished a step that is not the oldest one in flight")
            in_flight.popleft()
            if step.number is not None:
                return step
            self._ends[:0] = self._settlement.settle(step, set())
            self.has_unpublished = True
            if step.out is out:
                return None
        if out.total_num_scheduled_tokens:
            raise RuntimeError("vLLM finished a step that it did not schedule")
        return None

    def _note_tokens(self, rows: list[Row], tokens_ns: int, events: list[RequestEvent]) -> None:
        for row in rows:
            if row[3] is None:  # an ordinary decode, as almost every row: no call for it
                row[0].last_ns = tokens_ns
            elif gives_token(row):
                tracked = row[0]
                tracked.last_ns = tokens_ns
                if gives_first_token(row):
                    tracked.first_ns = tokens_ns
                    events.append(FirstToken(tracked.request_id))


def _end_of(tracked: TrackedRequest) -> RequestEvent:
    vllm = tracked.vllm
    status = vllm.status.name.removeprefix("FINISHED_").lower()
    if status == "aborted":
        return Aborted(tracked.request_id, "aborted in vLLM")
    reasons = {"stopped": "stop", "length_capped": "length", "ignored": "length"}
    return Finished(tracked.request_id, reasons.get(status, status), vllm.num_output_tokens)
