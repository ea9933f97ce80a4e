"""`SglangWatcher`: reads what SGLang queues, batches and finishes, for the step recorder.

SGLang does not report which request holds which page, so single pages are not published.
"""

import threading
import time
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.attached.settlement import BlockGroups
from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.adapters.attached.tracked import TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.sglang import shapes
from stepscope.engine.adapters.sglang.shapes import SglangBatch, SglangReq
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Aborted, Finished, Phase, RequestEvent
from stepscope.engine.telemetry.step_draft import StepDraft


class SglangRequest:
    """SGLang's `Req` as the step recorder reads it. It exposes only counts, and never a token.

    `num_prompt_tokens`: at arrival; SGLang shortens the prompt of a request that it rejects.
    `is_waiting`: it is in SGLang's queue; `was_admitted`: it has left the queue before.
    """

    __slots__ = ("is_waiting", "num_prompt_tokens", "req", "request_id", "was_admitted")

    def __init__(self, req: SglangReq) -> None:
        self.req = req
        self.request_id = req.rid
        self.num_prompt_tokens = len(req.origin_input_ids)
        self.is_waiting = True
        self.was_admitted = False

    @property
    def max_tokens(self) -> int:
        return int(self.req.sampling_params.max_new_tokens)

    @property
    def priority(self) -> int:
        return self.req.priority or 0

    @property
    def num_computed_tokens(self) -> int:
        return int(self.req.kv.kv_committed_len)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the client gets: those after a stop string do not count."""
        length = self.req.finished_len
        return len(self.req.output_ids) if length is None else length

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.req.output_ids)


class PageCounts:
    """Counts the pages. Create it on SGLang's own thread: only that thread may read the pool.

    It is a `PublishedPool` without the owners of pages. `num_evicted_tokens` were evicted from the
    radix cache and are not published yet.
    """

    groups: BlockGroups | None = None

    def __init__(self, scheduler: shapes.SglangScheduler) -> None:
        self._observer = scheduler.pool_stats_observer
        self._page_size = scheduler.page_size
        self._thread = threading.get_ident()
        self.num_evicted_tokens = 0
        self._pages = self._read()

    def evicted(self, before: int, num_tokens: int) -> None:
        """Count the tokens of an eviction, with those of evictions nested in it.

        One of SGLang's methods calls the other. So the count is set, to more than `before` it.
        """
        self.num_evicted_tokens = before + num_tokens

    def counts(self, num_queried: int = 0, num_hit: int = 0) -> wire.KVCounts:
        """On another thread than SGLang's, used and cached are those read last."""
        if threading.get_ident() == self._thread:
            self._pages = self._read()
        num_evicted, self.num_evicted_tokens = divmod(self.num_evicted_tokens, self._page_size)
        return wire.KVCounts(*self._pages, num_evicted, num_queried, num_hit)

    def _read(self) -> tuple[int, int, int]:  # used, cached and empty
        stats, size = self._observer.get_pool_stats(), self._page_size
        num_cached, num_empty = stats.full_evictable_size // size, stats.full_available_size // size
        num_pages = stats.full_capacity // size
        return max(0, num_pages - num_cached - num_empty), num_cached, num_empty

    def take(self, owner: int, blocks: Sequence[int], num_hit: int, group: int) -> None: ...
    def free(self, owner: int | None, block: int, *, is_cached: bool) -> None: ...

    def drain(self) -> list[wire.BlockMove]:
        return []

    def runs(self) -> list[wire.BlockRun] | None:
        return None


_ABORTED = "aborted in SGLang"
_FULL, _NOT_FULL = "out of KV blocks", "for a request of higher priority, or a pause"


class SglangWatcher:
    """Reports to the step recorder. Use it only under the attachment's lock."""

    kv_used: float | None = None  # `pool` knows the pages
    kv_transfers: wire.KVTransfers | None = None  # not of servers of prefill or decode alone
    halted: wire.EngineState | None = None  # whether SGLang is paused is not read

    def __init__(self, scheduler: shapes.SglangScheduler, parallel: Any) -> None:
        self._scheduler, self._parallel = scheduler, parallel
        self.pool = PageCounts(scheduler)
        self.recorder = StepRecorder(self.pool, not scheduler.disable_radix_cache)
        self._decoding: dict[str, TrackedRequest] = {}  # requests whose rows are ordinary decodes
        self._preempted: list[TrackedRequest] = []  # since the last step
        self._preempt_reason = _NOT_FULL
        self._planned: UnfinishedStep | None = None  # until it is launched

    def queued(self, req: SglangReq, is_retracted: bool) -> None:
        """Note that SGLang puts a request in its waiting queue, on arrival or after a preemption.

        `is_retracted`: SGLang took the request's pages because the pool is full.
        """
        tracked = self._tracked(req)
        if tracked is None:
            self._arrived(req)
        elif not _request_of(tracked).is_waiting:
            _request_of(tracked).is_waiting = True
            self._decoding.pop(req.rid, None)
            self._preempted.append(tracked)
            self._preempt_reason = _FULL if is_retracted else _NOT_FULL
            self.recorder.lost([tracked])

    def aborted(self, req: SglangReq) -> None:
        """Note that SGLang ends a request outside of a step."""
        tracked = self._tracked(req)
        if tracked is not None:
            self._end(tracked, Aborted(tracked.request_id, _ABORTED))

    def scheduled(self, plan: shapes.SglangPlan, start_ns: int, end_ns: int) -> None:
        """Note the batch that `get_next_batch_to_run` returned."""
        batch = plan.batch_to_run
        if batch is not None and (not batch.reqs or batch.forward_mode.is_idle()):
            batch = None
        if batch is not None or self._preempted:
            num_seats = self._parallel.pp_max_micro_batch_size
            step = UnfinishedStep(None, start_ns, end_ns, None, num_seats)
            step.preempt([tracked for tracked in self._preempted if not tracked.ended])
            step.preempt_reason = self._preempt_reason
            self._preempted = []
            if batch is not None:
                self._fill(step, batch, plan.running_batch)
                self._planned = step
            self.recorder.begun(step, runs=batch is not None)
        if batch is None:
            self.recorder.settle_empty()

    def launched(self, batch: SglangBatch, launch_ns: int) -> None:
        step, self._planned = self._planned, None
        if step is not None:
            step.key = batch.forward_iter
            step.launch_ns = launch_ns

    def processed(self, batch: SglangBatch, end_ns: int, num_dropped: int) -> StepDraft | None:
        """Return the record of the step whose `process_batch_result` has returned.

        None if the step ran no request. The time of its tokens is `end_ns`, when SGLang had passed
        them on: a little late. `num_dropped`: messages that subscribers have missed so far.
        """
        if not batch.reqs or batch.forward_mode.is_idle():
            return None
        ended_now = set()
        for req in batch.reqs:
            if req.finished_reason is not None and (tracked := self._tracked(req)) is not None:
                self._end(tracked, _end_of(tracked))
                ended_now.add(tracked)
        step = self.recorder.take(lambda step: step.key == batch.forward_iter)
        if step is None:
            raise RuntimeError("SGLang finished a batch that it did not schedule")
        page_size = self._scheduler.page_size
        for tracked, _, start, fields in step.rows:
            tracked.num_blocks = start // page_size + 1 if fields is None else fields[5]
        return self.recorder.record(step, end_ns, num_dropped, ended_now)

    @property
    def num_running(self) -> int:
        return max(0, len(self.recorder.table) - self.num_waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting_queue)

    def _tracked(self, req: SglangReq) -> TrackedRequest | None:
        """Return the tracked request of `req`; None if `req` is new. It ends one of the same id."""
        tracked = self.recorder.table.get(req.rid)
        if tracked is None or _request_of(tracked).req is req:
            return tracked
        self._end(tracked, _end_of(tracked))
        return None

    def _end(self, tracked: TrackedRequest, event: RequestEvent) -> None:
        self._decoding.pop(tracked.engine_request.request_id, None)
        self.recorder.ended(tracked, event)

    def _arrived(self, req: SglangReq) -> TrackedRequest:
        now_ns = monotonic_ns()
        stats = req.time_stats
        came_s = stats.created_time or stats.scheduler_recv_time
        age_ns = int((time.perf_counter() - came_s) * 1e9)
        return self.recorder.arrived(SglangRequest(req), now_ns - max(0, age_ns))

    def _fill(self, step: UnfinishedStep, batch: SglangBatch, running: SglangBatch) -> None:
        if batch.forward_mode.is_decode():
            self._fill_decodes(step, batch.reqs)
        else:
            for req, start, num_tokens in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
            ):
                tracked = self._tracked(req) or self._arrived(req)
                self._add_row(step, tracked, start, num_tokens)
        step.encode()
        if step.num_prefill_tokens:
            step.token_budget = self._scheduler.chunked_prefill_size
        step.num_running, step.num_waiting = self.num_running, self.num_waiting
        if step.num_waiting:
            step.waiting_reasons = self._waiting_reasons(step, running)

    def _fill_decodes(self, step: UnfinishedStep, reqs: Sequence[SglangReq]) -> None:
        """Add the rows of a decode batch. Almost every step is one, so avoid a call per row."""
        decoding, page_size, add = self._decoding, self._scheduler.page_size, step.rows.append
        for req in reqs:
            start = req.kv.kv_committed_len - 1  # it already counts the token of this step
            tracked = decoding.get(req.rid)
            if tracked is None:
                tracked = self._tracked(req) or self._arrived(req)
                self._add_row(step, tracked, start, 1)
                if not tracked.is_prefilling:
                    decoding[req.rid] = tracked
                continue
            if not start % page_size:
                tracked.block_table.append(0)
            add((tracked, Phase.DECODE, start, None))
        step.num_tokens = len(reqs)

    def _add_row(
        self, step: UnfinishedStep, tracked: TrackedRequest, start: int, num_tokens: int
    ) -> None:
        request = _request_of(tracked)
        if request.is_waiting:
            request.is_waiting = False
            if request.was_admitted:
                tracked.num_known = request.num_tokens
            request.was_admitted = True
            step.admitted.append((tracked, start))
        num_pages = -(-(start + num_tokens) // self._scheduler.page_size)
        tracked.block_table = [0] * num_pages
        step.num_tokens += num_tokens
        step.add_row(tracked, start, num_tokens, num_pages)

    def _waiting_reasons(self, step: UnfinishedStep, running: SglangBatch) -> dict[str, int]:
        num_waiting, budget = step.num_waiting, step.token_budget
        if step.preempted:
            return {"preemption": num_waiting}
        if step.num_running >= step.num_seats:
            return {"seats": num_waiting}
        # A chunk ends with a page, so up to a page of the budget may be left.
        if budget is not None and step.num_tokens + self._scheduler.page_size > budget:
            return {"budget": num_waiting}
        num_without_blocks = 1 if running.batch_is_full else 0
        reasons = {"kv_blocks": num_without_blocks, "queued": num_waiting - num_without_blocks}
        return {reason: count for reason, count in reasons.items() if count}


def _request_of(tracked: TrackedRequest) -> SglangRequest:
    assert isinstance(tracked.engine_request, SglangRequest)  # `_arrived` makes them all
    return tracked.engine_request


def _end_of(tracked: TrackedRequest) -> RequestEvent:
    request = _request_of(tracked)
    reason = request.req.finished_reason
    kind = "abort" if reason is None else reason.to_json()["type"]
    if kind == "abort":
        return Aborted(tracked.request_id, _ABORTED)
    return Finished(tracked.request_id, kind, request.num_output_tokens)
