"""`Watcher`: makes step records of what vLLM schedules and finishes.

vLLM may have two steps in flight. Everything is told in the order of the steps: what a step did to
requests and blocks is applied when that step ends, and a row of a request that had ended by then
counts as wasted.
"""

import time
from collections import deque
from collections.abc import Collection
from time import monotonic_ns

from stepscope.engine.adapters.vllm import row_encoding, versions
from stepscope.engine.adapters.vllm.block_books import BlockBooks
from stepscope.engine.adapters.vllm.shapes import SchedulerOutput, VllmRequest, VllmScheduler
from stepscope.engine.adapters.vllm.tracked import TrackedRequest
from stepscope.engine.adapters.vllm.unfinished_step import Row, Taken, UnfinishedStep
from stepscope.engine.protocol.wire import (
    Aborted,
    Admitted,
    Arrived,
    BlockMove,
    Finished,
    FirstToken,
    KVCounts,
    Phase,
    Preempted,
    RequestEvent,
    RequestView,
    RowFlag,
)
from stepscope.engine.telemetry.batch_rows import RowFields, keep_rows
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.telemetry.step_watcher import RunningRow, StepUnderWay

_DECODE, _PREFILL, _RECOMPUTE = int(Phase.DECODE), int(Phase.PREFILL), int(Phase.RECOMPUTE)
_LAST_CHUNK, _FIRST_TOKEN = int(RowFlag.LAST_CHUNK), int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)


class Watcher:
    """Belongs to whoever holds the attachment's lock.

    Attributes:
        next_step: number of the next step that vLLM schedules.
        told_step: the last step that was told, -1 before the first.
        knobs_version: told with each step that is scheduled.
        books: None where vLLM frees blocks that no output names.
        has_untold: something happened that no message has told.
    """

    def __init__(self, scheduler: VllmScheduler) -> None:
        self._scheduler = scheduler
        knows_blocks = versions.knows_blocks(scheduler)
        self.books = BlockBooks(scheduler.kv_cache_manager.block_pool) if knows_blocks else None
        self._caches = bool(scheduler.cache_config.enable_prefix_caching)
        self._table: dict[str, TrackedRequest] = {}
        self._in_flight: deque[UnfinishedStep] = deque()
        self._arrivals: list[RequestEvent] = []
        self._ends: list[RequestEvent] = []
        self._to_release: list[TrackedRequest] = []
        self._moves: list[BlockMove] = []
        self._last_to_sift = -1  # steps after this one have no rows of ended requests
        self._next_id = 0
        self._tokens_ns = 0
        self.next_step = 0
        self.told_step = -1
        self.knobs_version = 0
        self.has_untold = False

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
        self.has_untold = True

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
            self._preempt(step, preempted)
        self._give_blocks(step)
        self._make_rows(step)
        step.num_running = len(scheduler.running)
        step.num_waiting = versions.num_waiting(scheduler)
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
        events = self._settle(step, ended_now)
        assert step.number is not None
        num_wasted = self._drop_ended(step, ended_now) if step.number <= self._last_to_sift else 0
        self._note_tokens(step.rows, tokens_ns, events)
        events = [*self._arrivals, *events, *self._ends]
        self._arrivals, self._ends = [], []
        kv, moves = self._drain()
        is_ahead = step.start_ns < self._tokens_ns
        not_before_ns = self._tokens_ns
        self._tokens_ns = tokens_ns
        self.told_step = step.number
        self.has_untold = False
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
            self._to_release.append(tracked)
            self._last_to_sift = self.next_step - 1
            self.has_untold = True
        return set(found)

    def forgot_cache(self) -> None:
        """vLLM has reset its prefix cache."""
        if self.books is not None:
            self.books.check_cached()
            self.has_untold = True

    # Outside of a step

    def drain_events(self) -> list[RequestEvent]:
        """What happened to requests and was not told, in order."""
        events = self._arrivals + self._ends
        self._arrivals, self._ends = [], []
        self.has_untold = False
        return events

    def counts(self) -> KVCounts | None:
        """Blocks as they are told next; `drain_moves` has the changes."""
        kv, moves = self._drain()
        self._moves += moves
        return kv

    def drain_moves(self) -> list[BlockMove]:
        """Of the last `counts`."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def num_waiting(self) -> int:
        return versions.num_waiting(self._scheduler)

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The oldest step that vLLM has not finished."""
        step = next((each for each in self._in_flight if each.number is not None), None)
        if step is None or step.number is None:
            return None
        rows = [_running(row) for row in step.rows]
        since_ns = max(step.start_ns, self._tokens_ns)
        return StepUnderWay(step.number, since_ns, rows, step.token_budget)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self.num_waiting or self._in_flight)

    def views(self) -> list[RequestView]:
        """All requests that have not ended, as told."""
        num_in_flight: dict[int, int] = {}
        for step in self._in_flight:
            for row in step.rows:
                request_id = row[0].request_id
                num_in_flight[request_id] = num_in_flight.get(request_id, 0) + _num_tokens(row)
        return [
            tracked.view(num_in_flight.get(tracked.request_id, 0))
            for tracked in self._table.values()
        ]

    # Of one step

    def _preempt(self, step: UnfinishedStep, names: Collection[str]) -> None:
        found = [self._table[name] for name in names if name in self._table]
        for tracked in sorted(found, key=lambda each: each.request_id):
            tracked.block_table = []
            tracked.is_prefilling = True
            step.preempted.append(tracked)

    def _give_blocks(self, step: UnfinishedStep) -> None:
        out, table = step.out, self._table
        for new in out.scheduled_new_reqs:
            self._admit(step, table[new.req_id], new.block_ids, new.num_computed_tokens)
        again = out.scheduled_cached_reqs
        for i, block_ids in enumerate(again.new_block_ids):
            if block_ids is None:
                continue
            name = again.req_ids[i]
            tracked = table[name]
            if name in again.resumed_req_ids:
                tracked.was_preempted = True
                tracked.recompute_until = tracked.vllm.num_tokens
                self._admit(step, tracked, block_ids, again.num_computed_tokens[i])
            else:
                blocks = _own_ids(block_ids)
                tracked.block_table.extend(blocks)
                step.taken.append(Taken(tracked, blocks, 0))

    def _admit(
        self,
        step: UnfinishedStep,
        tracked: TrackedRequest,
        block_ids: Collection[Collection[int]],
        num_cached: int,
    ) -> None:
        blocks = _own_ids(block_ids)
        tracked.block_table = blocks.copy()
        step.taken.append(Taken(tracked, blocks, num_cached // self._scheduler.block_size))
        step.admitted.append((tracked, num_cached))

    def _make_rows(self, step: UnfinishedStep) -> None:
        table, rows, ordinary = self._table, step.rows, Phase.DECODE
        for name, num_tokens in step.out.num_scheduled_tokens.items():
            tracked = table[name]
            start = tracked.vllm.num_computed_tokens - num_tokens
            if num_tokens == 1 and not tracked.is_prefilling:
                rows.append((tracked, ordinary, start, None))
                continue
            fields = self._fields(step, tracked, start, num_tokens)
            if fields[1] != _DECODE:
                step.num_prefill_tokens += num_tokens
            rows.append((tracked, None, start, fields))
        step.batch = row_encoding.encode(rows)

    def _fields(
        self, step: UnfinishedStep, tracked: TrackedRequest, start: int, num_tokens: int
    ) -> RowFields:
        num_blocks = len(tracked.block_table)
        if not tracked.is_prefilling:  # with draft tokens
            return tracked.request_id, _DECODE, start, num_tokens, 0, num_blocks, _LAST_CHUNK
        flags = 0
        known = max(tracked.vllm.num_prompt_tokens, tracked.recompute_until)
        if start + num_tokens >= known:
            tracked.is_prefilling = False
            flags = _LAST_CHUNK
            if not tracked.has_first_token:
                tracked.has_first_token = True
                flags |= _FIRST_TOKEN
        num_cached = next((count for each, count in step.admitted if each is tracked), None)
        if num_cached is not None and tracked.was_preempted:
            flags |= _RESUMED
        phase = _RECOMPUTE if start < tracked.recompute_until else _PREFILL
        return tracked.request_id, phase, start, num_tokens, num_cached or 0, num_blocks, flags

    def _drop_ended(self, step: UnfinishedStep, ended_now: set[TrackedRequest]) -> int:
        """Take out the rows of requests that had ended before this step did: so many tokens."""
        kept, num_wasted = [], 0
        for i, row in enumerate(step.rows):
            if not row[0].ended or row[0] in ended_now:
                kept.append(i)
                continue
            num_wasted += _num_tokens(row)
            if not _is_decode(row):
                step.num_prefill_tokens -= _num_tokens(row)
        if num_wasted:
            step.rows = [step.rows[i] for i in kept]
            step.batch = keep_rows(step.batch, kept)
        return num_wasted

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
        """The step of `out`; steps that ran nothing are told with it."""
        in_flight = self._in_flight
        while in_flight:
            step = in_flight[0]
            if step.out is not out and step.number is not None:
                raise RuntimeError("vLLM finished a step that is not the oldest one in flight")
            in_flight.popleft()
            if step.number is not None:
                return step
            self._ends[:0] = self._settle(step, set())
            self.has_untold = True
            if step.out is out:
                return None
        if out.total_num_scheduled_tokens:
            raise RuntimeError("vLLM finished a step that it did not schedule")
        return None

    def _settle(self, step: UnfinishedStep, ended_now: set[TrackedRequest]) -> list[RequestEvent]:
        """What scheduling did to requests and blocks, now that it is told."""
        books = self.books
        events: list[RequestEvent] = []
        for tracked in step.preempted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.num_preemptions += 1
            tracked.status = "preempted"
            events.append(
                Preempted(tracked.request_id, len(tracked.told_blocks), "out of KV blocks")
            )
            if books is not None:
                books.release(tracked.request_id, tracked.told_blocks)
            tracked.told_blocks = []
        for tracked, blocks, num_hit in step.taken:
            if tracked.ended and tracked not in ended_now:
                if books is not None:
                    books.look_again(blocks)
                continue
            if books is not None:
                books.take(tracked.request_id, blocks, num_hit)
            tracked.told_blocks.extend(blocks)
        for tracked, num_cached in step.admitted:
            if tracked.ended and tracked not in ended_now:
                continue
            tracked.status = "running"
            if not tracked.num_preemptions:
                tracked.num_cached = num_cached
                if books is not None and self._caches:
                    books.num_queried += tracked.vllm.num_prompt_tokens
                    books.num_hit += num_cached
            events.append(Admitted(tracked.request_id, num_cached))
        return events

    def _note_tokens(self, rows: list[Row], tokens_ns: int, events: list[RequestEvent]) -> None:
        for tracked, _, _, fields in rows:
            if fields is None:
                tracked.last_ns = tokens_ns
            elif fields[6] & _LAST_CHUNK:
                tracked.last_ns = tokens_ns
                if fields[6] & _FIRST_TOKEN:
                    tracked.first_ns = tokens_ns
                    events.append(FirstToken(tracked.request_id))

    def _drain(self) -> tuple[KVCounts | None, list[BlockMove]]:
        books = self.books
        for tracked in self._to_release:
            if books is not None:
                books.release(tracked.request_id, tracked.told_blocks)
            tracked.told_blocks = []
        self._to_release.clear()
        if books is None:
            return None, []
        moves = books.drain()
        return books.counts(), moves


def _end_of(tracked: TrackedRequest) -> RequestEvent:
    vllm = tracked.vllm
    status = vllm.status.name.removeprefix("FINISHED_").lower()
    if status == "aborted":
        return Aborted(tracked.request_id, "aborted in vLLM")
    reasons = {"stopped": "stop", "length_capped": "length", "ignored": "length"}
    return Finished(tracked.request_id, reasons.get(status, status), vllm.num_output_tokens)


def _own_ids(block_ids: Collection[Collection[int]]) -> list[int]:
    """Our ids of the blocks of all KV groups, without vLLM's null block."""
    return [block - 1 for group in block_ids for block in group if block]


def _num_tokens(row: Row) -> int:
    return 1 if row[3] is None else row[3][3]


def _running(row: Row) -> RunningRow:
    request, _, start, fields = row
    if fields is None:
        return RunningRow(request.request_id, _DECODE, start, 1)
    return RunningRow(request.request_id, fields[1], fields[2], fields[3])


def _is_decode(row: Row) -> bool:
    return row[3] is None or row[3][1] == _DECODE
