"""A small SGLang scheduler: its names, rules and order of calls, without a model.

Classes, fields and methods are named as in SGLang 0.5.23 wherever the adapter reads them.
`make test-sglang` holds the adapter to SGLang's own scheduler.
"""

import pickle
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.adapters.sglang_objects import (
    PAGE,
    AbortReq,
    FinishReason,
    ForwardMode,
    RadixCache,
    Req,
    ReqKvInfo,
    ScheduleBatch,
    SetInternalStateReq,
    SetInternalStateReqOutput,
    TokenizedGenerateReqInput,
)

SECRET_TOKEN = 0x5EC2E7  # every token that a request gets
CONTEXT = 512
SEATS = "pp_max_micro_batch_size"


class Scheduler:
    """One tensor-parallel rank.

    Attributes:
        scheduled: tokens of each request, for each batch that was launched.
        retracted: ids, one for each retraction.
        hits: cached tokens of each request when it was first admitted.
        answers: those to requests that change the scheduler's state.
        num_used: pages in use after each batch, and evicted ones so far.
    """

    def __init__(
        self,
        *,
        chunk: int | None = 16,
        seats: int = 8,
        num_pages: int = 64,
        overlap: bool = False,
        mixed: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.parallel = SimpleNamespace(
            **dict.fromkeys(("pp_rank", "attn_cp_rank", "attn_dp_rank"), 0),
            **dict.fromkeys(("pp_size", "dp_size", "attn_dp_size"), 1),
            **{"dp_rank": None, "attn_tp_rank": tp_rank, "tp_size": tp_size, SEATS: seats},
        )
        self.chunked_prefill_size = chunk
        self.max_running_requests = seats
        self.enable_overlap, self.is_mixed_chunk = overlap, mixed
        self.max_prefill_tokens = num_pages * PAGE
        self.page_size = PAGE
        self.disable_radix_cache = self.enable_pdmux = self.enable_overlap_mlx = False
        self.is_generation = True
        self.schedule_policy = "fcfs"
        self.recv_skipper = self.truncation_align_size = self.dllm_config = None
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.server_args = SimpleNamespace(model_path="played", device="cuda", nnodes=1)
        self.model_config = SimpleNamespace(context_len=CONTEXT, head_dim=64)
        self.tree_cache = RadixCache(num_free=num_pages)
        self.pool_stats_observer = SimpleNamespace(get_pool_stats=self._pool_stats)
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch()
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.result_queue: deque[ScheduleBatch] = deque()
        self.forward_ct = 0
        self._pending_chunked_abort_req: Req | None = None
        self._handlers: dict[type, Callable[[Any], object]] = {
            TokenizedGenerateReqInput: self.handle_generate_request,
            AbortReq: self.abort_request,
            SetInternalStateReq: self.set_internal_state,
        }
        self.requests: list[Req] = []
        self.scheduled: list[dict[str, int]] = []
        self.retracted: list[str] = []
        self.hits: dict[str, int] = {}
        self.answers: list[object] = []
        self.num_used: list[tuple[int, int]] = []

    # What comes in

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for recv_req in recv_reqs:
            output = self._handlers[type(recv_req)](recv_req)
            if output is not None:
                self.answers.append(output)

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        sampling = SimpleNamespace(max_new_tokens=recv_req.max_new_tokens)
        req = Req(recv_req.rid, list(recv_req.input_ids), sampling, recv_req.stop_after)
        self.requests.append(req)
        self._add_request_to_queue(req)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def abort_request(self, recv_req: AbortReq) -> None:
        if self.chunked_req is not None and self.chunked_req.rid == recv_req.rid:
            self._pending_chunked_abort_req = self.chunked_req
            return
        for req in [req for req in self.waiting_queue if req.rid == recv_req.rid]:
            self.waiting_queue.remove(req)
            self.send_abort_output(recv_req, req)
        for batch in (self.running_batch, self.last_batch):
            for req in batch.reqs if batch is not None else ():
                if req.rid == recv_req.rid and not req.finished():
                    req.to_finish = FinishReason("abort")

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        req.finished_reason = FinishReason("abort")

    def set_internal_state(self, recv_req: SetInternalStateReq) -> SetInternalStateReqOutput:
        is_valid = recv_req.server_args.keys() == {SEATS} and (
            1 <= recv_req.server_args[SEATS] <= self.max_running_requests
        )
        if is_valid:
            vars(self.parallel).update(recv_req.server_args)
        return SetInternalStateReqOutput(is_valid)

    def _poll_timeout_aborts(self) -> list[Any]:
        return []

    # The next batch

    def get_next_batch_to_run(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> SimpleNamespace:
        self._abort_chunked()
        if last_batch is not None and last_batch.forward_mode.is_extend():
            last_batch.filter_batch((self.chunked_req, last_batch.chunked_req))
            merged = running_batch.reqs + last_batch.reqs
            running_batch = ScheduleBatch(merged, batch_is_full=running_batch.batch_is_full)
        num_before = len(running_batch.reqs)
        running_batch.filter_batch()
        if len(running_batch.reqs) < num_before or not running_batch.reqs:
            running_batch.batch_is_full = False
        batch = self._new_prefill(running_batch)
        if batch is not None and batch.forward_mode is ForwardMode.MIXED:
            running_batch = ScheduleBatch()
        if batch is None and running_batch.reqs:
            batch = self._decode(running_batch)
        return SimpleNamespace(batch_to_run=batch, running_batch=running_batch)

    def _abort_chunked(self) -> None:
        req, self._pending_chunked_abort_req = self._pending_chunked_abort_req, None
        if req is not None and req is self.chunked_req:
            self.chunked_req = None
            self.tree_cache.release(req.kv, req.ids, keep=False)
            self.send_abort_output(AbortReq(req.rid), req)

    def _new_prefill(self, running: ScheduleBatch) -> ScheduleBatch | None:
        chunk = self.chunked_prefill_size
        budget = CONTEXT if chunk is None else chunk
        if self.is_mixed_chunk:
            budget -= len(running.reqs)
        new = ScheduleBatch(forward_mode=ForwardMode.EXTEND)
        if self.chunked_req is not None:
            budget -= self._add_prefill(new, self.chunked_req, budget)
        for req in list(self.waiting_queue):
            num_seats = getattr(self.parallel, SEATS)
            running.batch_is_full |= len(new.reqs) + len(running.reqs) >= num_seats
            if running.batch_is_full or budget <= 0 or self.chunked_req is not None:
                break
            num_tokens = self._admit(new, req, budget)
            running.batch_is_full |= not num_tokens and budget >= PAGE
            if not num_tokens:
                break
            budget -= num_tokens
        if not new.reqs:
            return None
        new.chunked_req = self.chunked_req
        if self.is_mixed_chunk and running.reqs and self._prepare_for_decode(running):
            new.forward_mode = ForwardMode.MIXED
            new.reqs += running.reqs
            new.prefix_lens += [req.kv.kv_committed_len - 1 for req in running.reqs]
            new.extend_lens += [1] * len(running.reqs)
        return new

    def _admit(self, new: ScheduleBatch, req: Req, budget: int) -> int:
        num_hit = self.tree_cache.match(req.ids[:-1])
        self.tree_cache.lock(req.ids, num_hit, 1)
        req.kv = ReqKvInfo(num_hit * PAGE, num_hit, num_hit)
        num_tokens = self._add_prefill(new, req, budget)
        if not num_tokens:
            self.tree_cache.release(req.kv, req.ids, keep=False)
            return 0
        self.waiting_queue.remove(req)
        req.is_retracted = False
        self.hits.setdefault(req.rid, num_hit * PAGE)
        return num_tokens

    def _add_prefill(self, new: ScheduleBatch, req: Req, budget: int) -> int:
        """Add the rest of a request's prompt, or as many whole pages as fit; 0: nothing fits."""
        start = req.kv.kv_committed_len
        num_tokens = len(req.ids) - start
        is_last = num_tokens <= budget
        if not is_last:
            num_tokens = budget // PAGE * PAGE
        if num_tokens <= 0 or not self.tree_cache.extend(req.kv, start + num_tokens):
            return 0
        self.chunked_req = None if is_last else req
        new.reqs.append(req)
        new.prefix_lens.append(start)
        new.extend_lens.append(num_tokens)
        return num_tokens

    def _decode(self, running: ScheduleBatch) -> ScheduleBatch | None:
        queued = self.result_queue[0].reqs if self.result_queue else []
        running.filter_batch(
            tuple(r for r in running.reqs if r in queued and r.next_output_finishes_by_length())
        )
        retracted = []
        while running.reqs and not self._prepare_for_decode(running):
            req = running.reqs.pop()
            self.tree_cache.release(req.kv, req.ids, keep=False)
            req.is_retracted = True
            retracted.append(req)
        for req in retracted:
            self.retracted.append(req.rid)
            self._add_request_to_queue(req, is_retracted=True)
        running.forward_mode = ForwardMode.DECODE
        return running if running.reqs else None

    def _prepare_for_decode(self, batch: ScheduleBatch) -> bool:
        num_new = sum(req.kv.kv_committed_len == req.kv.num_pages * PAGE for req in batch.reqs)
        if num_new > self.tree_cache.num_free + self.tree_cache.evictable_size() // PAGE:
            return False
        return all(
            self.tree_cache.extend(req.kv, req.kv.kv_committed_len + 1) for req in batch.reqs
        )

    # Its run

    def run_batch(self, batch: ScheduleBatch) -> str:
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        lens = [1] * len(batch.reqs) if batch.forward_mode.is_decode() else batch.extend_lens
        self.scheduled.append({req.rid: n for req, n in zip(batch.reqs, lens, strict=True)})
        return "SGLang's own result"

    def process_batch_result(self, batch: ScheduleBatch, result: str) -> None:
        assert result == "SGLang's own result"
        for req in batch.reqs:
            if req.finished() or req.is_retracted or req is batch.chunked_req:
                continue
            req.output_ids.append(SECRET_TOKEN)
            req.update_finish_state()
            if req.finished():
                self.tree_cache.release(req.kv, req.ids[:-1], keep=True)
        stats = self._pool_stats()
        num_used = stats.full_capacity - stats.full_available_size - stats.full_evictable_size
        self.num_used.append((num_used // PAGE, self.tree_cache.num_evicted))

    def step(self) -> None:
        """The rest of a turn of `event_loop_normal` or `event_loop_overlap`."""
        plan = self.get_next_batch_to_run(
            running_batch=self.running_batch, last_batch=self.last_batch
        )
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch is not None:
            result = self.run_batch(batch)
            if self.enable_overlap:
                self.result_queue.append(batch.copy())
            else:
                self.process_batch_result(batch, result)
        if self.enable_overlap and self.last_batch is not None:
            self.process_batch_result(self.result_queue.popleft(), "SGLang's own result")
        self.last_batch = batch

    def run_event_loop(self) -> str:
        """Run turns while there is work."""
        while self.has_work:
            turn([self])
        return "SGLang's own end"

    @property
    def has_work(self) -> bool:
        batches = (self.running_batch, self.last_batch)
        has_reqs = any(batch is not None and batch.reqs for batch in batches)
        return has_reqs or bool(self.waiting_queue) or self.chunked_req is not None

    def _pool_stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            full_available_size=self.tree_cache.num_free * PAGE,
            full_evictable_size=self.tree_cache.evictable_size(),
            full_capacity=self.max_prefill_tokens,
        )


def turn(ranks: list[Scheduler], *came: object) -> None:
    """Run one turn of every rank's event loop: the first rank's input is broadcast to all."""
    requests = [*came, *ranks[0]._poll_timeout_aborts()]
    for rank in ranks:
        rank.process_input_requests(pickle.loads(pickle.dumps(requests)))
    for rank in ranks:
        rank.step()
