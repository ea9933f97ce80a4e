"""`Scheduler`: decides which requests wait and which run, and adds sampled tokens to them.

The scheduler owns the queues and the status of each request. A `StepPlan` plans one step, driven by
a batching mode (`batching.py`). The `KVCacheManager` owns the blocks.

`schedule` and `update` alternate: all tokens of a step are known before the next one is scheduled,
and `Request.num_computed_tokens` advances in `update`. `schedule` reads the knobs, so any of them
may change between two steps.

With overlap, the next step is scheduled before the tokens of the running step are known. `assume`
counts those tokens as present, `schedule` relies on that, and `update` adds them later. If a
request turns out to have ended, its row in the next step is wasted.
"""

from collections.abc import Sequence

import msgspec

from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.wire import (
    Aborted,
    Finished,
    FirstToken,
    Phase,
    Preempted,
    RequestEvent,
)
from stepscope.engine.scheduling.batching import BATCHING_MODES, PrefillCadence
from stepscope.engine.scheduling.kv_cache import KVCacheManager, PrefixHashes
from stepscope.engine.scheduling.ngram import NgramProposer
from stepscope.engine.scheduling.request import Request, RequestStatus, WaitingQueue
from stepscope.engine.scheduling.step import KVReceiver, ScheduledRow
from stepscope.engine.scheduling.step_plan import StepPlan


class Scheduler:
    """Plans every step over one KV cache, in the batching mode that the knobs name.

    Args:
        receiver: loads keys and values that a prefill engine hands over; None if this engine takes
            no such requests.

    Attributes:
        leaving: running requests that wait until the decode engine has room for them. They keep
            their blocks and get no row, and no other request is admitted meanwhile.

    Raises:
        ConfigError: the cache does not hold one request of `limits.max_model_len` tokens; such a
            request would preempt itself for ever.
    """

    def __init__(
        self, kv: KVCacheManager, knobs: Knobs, limits: Limits, receiver: KVReceiver | None = None
    ) -> None:
        if kv.num_blocks * kv.block_size < limits.max_model_len:
            raise ConfigError(
                "kv_too_small",
                f"{kv.num_blocks} KV blocks of {kv.block_size} tokens do not hold one request of "
                f"max_model_len={limits.max_model_len} tokens: give the KV cache more memory, or "
                "lower max_model_len",
            )
        self.kv = kv
        self.limits = limits
        self.waiting = WaitingQueue(knobs.policy)
        self.receiver = receiver
        self.running: list[Request] = []  # in order of admission
        self.leaving: list[Request] = []
        self.requests: dict[int, Request] = {}  # all unfinished ones
        # Requests admitted in the last step: request id -> tokens that were cached; and those of
        # them that came with keys and values from another engine, or had lost theirs.
        self.admitted_now: dict[int, int] = {}
        self.loaded_now: list[Request] = []
        self.resumed_now: dict[int, int] = {}
        self.overtaken_now: list[Request] = []  # while others were admitted, for their priority
        self.unpublished_events: list[RequestEvent] = []  # what happened to requests, in order
        # Tokens of the last step. Padding is what a padding engine would compute in addition.
        self.num_prefill_tokens = 0  # recomputed ones included
        self.num_decode_tokens = 0  # drafts included
        self.num_draft_tokens = 0
        self.num_padded_tokens = 0
        self.has_held_prefills = False  # as in `StepRecord`
        self.prefix_hashes: PrefixHashes | None = None  # None: they are not published
        self._next_in_turn: Request | None = None
        self._num_slots = 0
        self._wait_reason = "queued"
        self._pending: list[Request] = []  # get a token from the step in flight
        self._ending: set[Request] = set()  # ... for which it is the last one
        # (request, tokens computed): blocks that become full with a token of the step in flight
        self._filled_later: list[tuple[Request, int]] = []
        self._cadence = PrefillCadence()
        self._num_penalised = 0  # requests with penalties
        self._token_limit: int | None = None
        self._proposer: NgramProposer | None = None
        self.knobs = knobs

    @property
    def knobs(self) -> Knobs:
        """The current knobs. Set them between steps, after `Knobs.check`."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._set_step_knobs()
        self.waiting.reorder(knobs.policy)
        self.kv.enable_prefix_caching = knobs.enable_prefix_caching
        self._proposer = NgramProposer.for_knobs(knobs, before=self._proposer)
        if knobs.batching != "static":
            self._num_slots = 0

    @property
    def token_limit(self) -> int | None:
        """A limit on the tokens of a step, below max_num_batched_tokens; None if there is none.

        Ignored without chunked prefill: a prompt above the limit would never run.
        """
        return self._token_limit

    @token_limit.setter
    def token_limit(self, limit: int | None) -> None:
        self._token_limit = limit
        self._set_step_knobs()

    def _set_step_knobs(self) -> None:
        self.step_knobs = knobs = self._knobs  # the knobs, with the budget lowered to the limit
        limit = self._token_limit
        if limit is None or not knobs.enable_chunked_prefill:
            return
        if limit < knobs.max_num_batched_tokens:
            self.step_knobs = msgspec.structs.replace(knobs, max_num_batched_tokens=limit)

    def add(self, request: Request) -> None:
        """Queue a new request. It has to fit: prompt + max_tokens <= max_model_len."""
        self.requests[request.request_id] = request
        self._num_penalised += request.has_penalties
        self.waiting.append(request)

    def abort(self, request_id: int, reason: str) -> Request | None:
        """End a request between two steps and free its blocks.

        Returns:
            The request; None if there is none with this id.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        else:
            (self.leaving if request in self.leaving else self.running).remove(request)
        self._end(request, "abort")
        self.unpublished_events.append(Aborted(request_id, reason))
        return request

    def has_work(self) -> bool:
        """Whether a step would have something to do: a request to run or to admit."""
        return bool(self.running) or (bool(self.waiting) and not self.leaving)

    def set_aside(self, request: Request) -> None:
        """Move a running request to `leaving`, until the decode engine has room for it."""
        self.running.remove(request)
        self.leaving.append(request)

    def keep_here(self, request: Request) -> None:
        """Move a request from `leaving` back to `running`: it is not handed over after all."""
        self.leaving.remove(request)
        self.running.append(request)

    def hand_over(self, request: Request, engine: str) -> None:
        """End a running request in this engine, because the engine `engine` continues it.

        Frees its blocks.
        """
        (self.leaving if request in self.leaving else self.running).remove(request)
        request.high_water = max(request.high_water, request.num_computed_tokens)
        request.num_computed_tokens = 0
        self._end(request, None)
        self.unpublished_events.append(
            Finished(request.request_id, "handed_over", request.num_output_tokens, handed_to=engine)
        )

    def take_back(self, request: Request) -> None:
        """Queue a handed-over request again, in front of all others; its tokens are recomputed."""
        request.status = RequestStatus.WAITING
        request.high_water = request.num_tokens - 1  # what the decode engine computed, too
        self.requests[request.request_id] = request
        self._num_penalised += request.has_penalties
        self.waiting.prepend(request)

    def drain_events(self) -> list[RequestEvent]:
        """Return `unpublished_events` and clear them."""
        events, self.unpublished_events = self.unpublished_events, []
        return events

    def return_events(self, events: list[RequestEvent]) -> None:
        """Put drained events in front of `unpublished_events`, as they were not published."""
        self.unpublished_events[:0] = events

    def waiting_reasons(self) -> dict[str, int]:
        """Return how many requests wait for each reason.

        These reasons hold for all waiting requests: `seats` (max_num_seqs), `budget` (tokens of the
        step), `preemption` (a step that preempted admits no request), `batch` (in the modes `naive`
        and `static`: running requests must end first), `cadence` (the step leaves prefills out,
        `prefill_schedule_interval`), `decode_engine` (it has no room for the
        requests to be handed over) and `transfer` (a step loads only one handed-over request).
        `kv_blocks` holds for the first request; the others are `queued` behind it.
        """
        num_waiting = len(self.waiting)
        if not num_waiting:
            return {}
        if self._wait_reason != "kv_blocks":
            return {self._wait_reason: num_waiting}
        reasons = {"kv_blocks": 1, "queued": num_waiting - 1}
        return {reason: count for reason, count in reasons.items() if count}

    def can_run_ahead(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the next step can be scheduled before the tokens of the running one are known.

        Not in static batching, where requests wait for each other. Not if the next step depends on
        the unknown tokens, as drafts and penalties do. And not if a request might have to be
        preempted, because a request that ends in the running step may free enough blocks.

        Args:
            rows: those of the running step.
        """
        knobs, kv = self._knobs, self.kv
        if knobs.batching == "static" or self._proposer is not None:
            return False
        if self._num_penalised and any(row.samples and row.request.has_penalties for row in rows):
            return False
        budget = self.step_knobs.max_num_batched_tokens
        num_free = kv.num_free_blocks
        # Each running request may begin a new block, and the budget fills whole ones.
        most = len(self.running) + budget // kv.block_size
        if num_free >= min(most, kv.num_outstanding_blocks):
            return True
        # Close to the limit: count exactly. `rows` may not be in `num_computed_tokens` yet.
        num_ahead = dict.fromkeys((row.request.request_id for row in rows), budget)
        num_needed = 0
        for request in self.running:
            reach = request.num_computed_tokens + budget + num_ahead.get(request.request_id, 0)
            num_tokens = min(len(request.token_ids) + 1, reach)
            num_needed += max(0, kv.num_blocks_for(num_tokens) - len(request.block_table))
        return num_needed <= num_free

    def assume(self, rows: Sequence[ScheduledRow]) -> None:
        """Count the tokens of a launched step as computed, though its result is unknown.

        Marks the requests that get a token from that step as pending.
        """
        pending, ending = self._pending, self._ending
        for request, _, start, num_tokens, samples in rows:
            request.num_computed_tokens = num_tokens = start + num_tokens
            if samples:
                request.num_pending_tokens = 1
                pending.append(request)
                if num_tokens + 1 >= request.max_num_tokens:
                    ending.add(request)

    def schedule(self) -> list[ScheduledRow]:
        """Plan the next step and return its rows, in the order in which they are laid out.

        A step has at most `max_num_batched_tokens` tokens in all, `num_padded_tokens` included.

        Returns:
            An empty list if there is nothing to do, and in the rare step in which the only request
            preempted itself (there is still work then). After `assume` also if the step in flight
            ends all requests.
        """
        plan = StepPlan(
            self.running,
            self.waiting,
            self.kv,
            self.step_knobs,
            alone=len(self.requests) <= 1,
            next_in_turn=self._next_in_turn,
            num_slots=self._num_slots,
            ending=self._ending,
            proposer=self._proposer,
            receiver=self.receiver,
            wait_reason="decode_engine" if self.leaving else "queued",
            holds_prefills=self._cadence.holds(
                self._knobs.prefill_schedule_interval, self.running, self._ending
            ),
        )
        if self._proposer is not None:
            self._proposer.begin_step()
        spend = BATCHING_MODES[self._knobs.batching]
        spend(plan)
        plan.register_filled()
        self.admitted_now, self.resumed_now = plan.admitted, plan.resumed
        self.loaded_now, self.overtaken_now = plan.loaded, plan.overtaken
        self.num_prefill_tokens = plan.num_prefill_tokens
        self.num_decode_tokens = plan.num_tokens - plan.num_prefill_tokens
        self.num_draft_tokens = plan.num_draft_tokens
        self.num_padded_tokens, self._num_slots = plan.num_padded_tokens, plan.num_slots
        self._next_in_turn, self._wait_reason = plan.next_in_turn, plan.wait_reason
        self._filled_later += plan.filled_later
        self.unpublished_events += plan.events
        self.has_held_prefills = plan.has_held
        if plan.rows:
            admits = not (plan.holds_prefills or plan.has_preempted)
            has_queue = bool(self.waiting) if admits else None
            rows = plan.rows if plan.num_prefill_tokens else ()
            self._cadence.note(rows, has_queue=has_queue)
        return plan.rows

    def skip(self, num_steps: int) -> None:
        """Take account of decode steps that a simulation did not schedule one by one."""
        interval = self._knobs.prefill_schedule_interval
        self._cadence.skip(num_steps, interval, has_queue=bool(self.waiting))

    def update(self, rows: list[ScheduledRow], token_ids: list[int | None]) -> list[Request]:
        """Add the tokens of a step to their requests.

        Args:
            rows: the rows of the step.
            token_ids: one token a row; None if the row does not sample.

        Returns:
            The requests that finished; their blocks are free.
        """
        finished: list[Request] = []
        decode = Phase.DECODE
        for (request, phase, start, num_tokens, samples), token_id in zip(
            rows, token_ids, strict=True
        ):
            request.num_computed_tokens = start + num_tokens
            if token_id is None:
                if samples:
                    raise ValueError(f"request {request.request_id} samples and got no token")
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            if phase is not decode and len(tokens) == request.num_prompt_tokens + 1:
                self.unpublished_events.append(FirstToken(request.request_id))
            if (
                len(tokens) >= request.max_num_tokens
                or token_id in request.end_token_ids
                or request.stop_text is not None
            ):
                reason = request.finish_reason_after(token_id)
                if reason is not None:
                    self._end(request, reason)
                    self.unpublished_events.append(self._finished(request, reason))
                    finished.append(request)
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        if self._pending:
            self.settle()
        return finished

    def settle(self) -> None:
        """Forget which requests are pending (see `assume`): the step in flight ended or failed."""
        for request in self._pending:
            request.num_pending_tokens = 0
        self._pending.clear()
        self._ending.clear()
        for request, num_tokens in self._filled_later:
            if request.status is RequestStatus.RUNNING:
                self.kv.register(request, num_tokens)
        self._filled_later.clear()

    def preempt_after_failure(self, request: Request, reason: str) -> None:
        """Preempt a running request between two steps; its tokens are recomputed."""
        self.running.remove(request)
        self.unpublished_events.append(Preempted(request.request_id, self.kv.free(request), reason))
        request.preempt()
        self.waiting.prepend(request)

    def _finished(self, request: Request, reason: str) -> Finished:
        hashes = None if self.prefix_hashes is None else self.prefix_hashes.of_output(request)
        return Finished(request.request_id, reason, request.num_output_tokens, hashes)

    def _end(self, request: Request, reason: str | None) -> None:
        self._num_penalised -= request.has_penalties
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
