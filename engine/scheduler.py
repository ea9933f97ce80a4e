"""`Scheduler`: what one step may do, and what its tokens change.

The scheduler owns the queues and every decision about order, budget, seats and preemption; the
`KVCacheManager` owns the blocks; a policy (`policies.py`) owns the order in which the budget is
spent. `schedule` and `update` alternate: all tokens of a step are known before the next one is
scheduled, and `Request.num_computed_tokens` advances in `update`. Knobs are read at the top of a
step, so that any of them may change between two steps.

Rules shared by all policies are vLLM's (v1): a running request that needs a block and finds none
preempts the latest admitted one (by priority: the one served last), itself at worst; nobody is
admitted in a step that preempted; the first waiting request that does not fit ends admission.
"""

from collections.abc import Callable
from functools import partial

from stepscope.engine.config import ConfigError, Knobs, Limits
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request, RequestStatus
from stepscope.engine.step import ScheduledRow
from stepscope.engine.waiting_queue import WaitingQueue, rank
from stepscope.engine.wire import (
    Aborted,
    Admitted,
    Finished,
    FirstToken,
    Phase,
    Preempted,
    RequestEvent,
)

# The constructor of a NamedTuple takes twice as long, which shows at a thousand rows a step.
_new_row: Callable[[tuple[Request, Phase, int, int, bool]], ScheduledRow] = partial(
    tuple.__new__, ScheduledRow
)


class Scheduler:
    """Continuous batching over one KV cache.

    Raises:
        ConfigError: the cache does not hold one request of `limits.max_model_len` tokens, so that
            a request alone could preempt itself for ever.
    """

    def __init__(self, kv: KVCacheManager, knobs: Knobs, limits: Limits) -> None:
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
        self.running: list[Request] = []  # in order of admission
        self.requests: dict[int, Request] = {}  # all unfinished ones
        self.admitted_now: dict[int, int] = {}  # in the last step: request id -> tokens hit
        self.resumed_now: dict[int, int] = {}  # ... those of them that had been preempted before
        self.knobs = knobs
        self._events: list[RequestEvent] = []
        self._num_promised = 0  # blocks that the running requests may come to need in all
        self._wait_reason = "queued"
        self._begin_step()

    @property
    def knobs(self) -> Knobs:
        """Settings in force. Replaced between steps; they have passed `Knobs.check`."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._spend = POLICIES[knobs.order]
        self.starved: list[Request] = []  # decodes that got nothing in the last step
        self.waiting.reorder(knobs.policy)
        self.kv.enable_prefix_caching = knobs.enable_prefix_caching

    def add(self, request: Request) -> None:
        """Queue a new request. It has to fit: prompt + max_tokens <= max_model_len."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: int, reason: str) -> Request | None:
        """End a request between two steps; its blocks are free at once. None: there is no such."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request, "abort")
        self._events.append(Aborted(request_id, reason))
        return request

    def has_work(self) -> bool:
        return bool(self.requests)

    def drain_events(self) -> list[RequestEvent]:
        """Admitted, FirstToken, Finished, Preempted and Aborted since the last drain, in order."""
        events, self._events = self._events, []
        return events

    def waiting_reasons(self) -> dict[str, int]:
        """How many requests wait, by what they wait for.

        `seats` (max_num_seqs), `budget` (tokens of the step) and `preemption` (a step that
        preempted admits nobody) hold up all that wait; `kv_blocks` holds up the first, and the
        others are `queued` behind it.
        """
        num_waiting = len(self.waiting)
        if not num_waiting:
            return {}
        if self._wait_reason != "kv_blocks":
            return {self._wait_reason: num_waiting}
        reasons = {"kv_blocks": 1, "queued": num_waiting - 1}
        return {reason: count for reason, count in reasons.items() if count}

    def schedule(self) -> list[ScheduledRow]:
        """The rows of the next step, in the order in which they are laid out.

        At most `max_num_batched_tokens` tokens in all. Empty when there is nothing to do, and in
        the rare step whose only request preempted itself: there is still work then.
        """
        self._begin_step()
        self._spend(self)
        self._register_filled()
        return self._rows

    def update(self, rows: list[ScheduledRow], token_ids: list[int | None]) -> list[Request]:
        """Take in the tokens of a step, one entry a row (None where the row does not sample).

        Returns the requests that finished; their blocks are free.
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
                self._events.append(FirstToken(request.request_id))
            if len(tokens) >= request.max_num_tokens or token_id in request.end_token_ids:
                reason = request.finish_reason_after(token_id)
                if reason is not None:
                    self._end(request, reason)
                    self._events.append(
                        Finished(request.request_id, reason, request.num_output_tokens)
                    )
                    finished.append(request)
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return finished

    # What policies share (`policies.Spending`).

    def advance(self, requests: list[Request], decodes_only: bool = False) -> list[Request]:
        """Give each request, in this order, its next tokens while there is budget.

        With `decodes_only`, requests whose prompts are not complete are left out and returned.
        """
        postponed: list[Request] = []
        rows, block_size, decode = self._rows, self.kv.block_size, Phase.DECODE
        last_offset = block_size - 1
        budget = self._budget  # a local, and handed over where others need it: this loop is hot
        for request in requests.copy():
            if budget <= 0:
                break
            if self._has_preempted and request.status is not RequestStatus.RUNNING:
                continue
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) - start
            if num_tokens == 1 and start >= len(request.prompt_token_ids):
                offset = start % block_size
                if not offset:
                    self._budget = budget
                    fits = self._grow(request, start + 1)
                    budget = self._budget
                    if not fits:
                        break
                if offset == last_offset:
                    self._filled.append((request, start + 1))
                rows.append(_new_row((request, decode, start, 1, True)))
                budget -= 1
            elif decodes_only:
                postponed.append(request)
            else:
                self._budget = budget
                fits = self._advance_prompt(request, start, num_tokens)
                budget = self._budget
                if not fits:
                    break
        self._budget = budget
        if decodes_only:
            self.starved = self._unserved(requests) if self._budget <= 0 else []
        return postponed

    def admit(self) -> None:
        """Take in waiting requests while seats, budget and KV blocks last."""
        self._register_filled()
        while self.waiting and self._wait_reason == "queued":
            if self._has_preempted:
                self._wait_reason = "preemption"
            elif len(self.running) >= self._knobs.max_num_seqs:
                self._wait_reason = "seats"
            elif self._budget <= 0:
                self._wait_reason = "budget"
            else:
                self._try_to_admit(self.waiting.peek())
        if self.waiting:
            self.waiting.peek().waiting_reason = self._wait_reason

    def _begin_step(self) -> None:
        knobs = self._knobs
        self._rows: list[ScheduledRow] = []
        self._budget = knobs.max_num_batched_tokens
        self._has_preempted = False
        self._filled: list[tuple[Request, int]] = []  # (request, tokens computed after the step)
        self._wait_reason = "queued"
        self.admitted_now = {}
        self.resumed_now = {}
        # The threshold keeps a long prompt from starving others: alone it has nobody to starve.
        alone = len(self.requests) <= 1
        self._max_chunk = 0 if alone else knobs.long_prefill_token_threshold

    def _advance_prompt(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give a running request its next chunk; False: there was no room, it preempted itself."""
        chunk = self._chunk(num_tokens)
        if not chunk:
            # Whole prompts only, and this one does not fit beside the others: nobody overtakes it.
            self._wait_reason = "budget"
            return True
        if not self._grow(request, start + chunk):
            return False
        self._filled.append((request, start + chunk))
        self._add_prefill(request, start, chunk)
        return True

    def _chunk(self, num_tokens: int) -> int:
        """How many of the `num_tokens` a prompt still needs it gets now; 0: none."""
        if not self._knobs.enable_chunked_prefill:
            return num_tokens if num_tokens <= self._budget else 0
        if 0 < self._max_chunk < num_tokens:
            num_tokens = self._max_chunk
        return min(num_tokens, self._budget)

    def _add_prefill(self, request: Request, start: int, num_tokens: int) -> None:
        if start < request.high_water:
            phase = Phase.RECOMPUTE
        elif start >= request.num_prompt_tokens and start + 1 == request.num_tokens:
            phase = Phase.DECODE
        else:
            phase = Phase.PREFILL
        samples = start + num_tokens == request.num_tokens
        self._rows.append(_new_row((request, phase, start, num_tokens, samples)))
        self._budget -= num_tokens

    def _unserved(self, requests: list[Request]) -> list[Request]:
        served = {row.request.request_id for row in self._rows}
        return [
            request
            for request in requests
            if request.request_id not in served
            and request.status is RequestStatus.RUNNING
            and request.num_computed_tokens >= request.num_prompt_tokens
        ]

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens`, preempting for it; False: the request preempted itself."""
        while not self.kv.grow(request, num_tokens):
            victim = self.running[-1]
            if self._knobs.policy == "priority":
                victim = max(self.running, key=rank)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._has_preempted = True
        if self.running[-1] is request:
            self.running.pop()
        else:
            self.running.remove(request)
        for index, row in enumerate(self._rows):
            if row.request is request:
                self._budget += row.num_tokens
                del self._rows[index]
                break
        self._num_promised -= self._num_blocks_in_all(request)
        self._events.append(Preempted(request.request_id, self.kv.free(request), "kv_full"))
        request.status = RequestStatus.PREEMPTED
        request.high_water = max(request.high_water, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend(request)

    def _register_filled(self) -> None:
        """Blocks that rows of this step fill can be hit, now that no row is withdrawn any more."""
        for request, num_tokens in self._filled:
            if request.status is RequestStatus.RUNNING:
                self.kv.register(request, num_tokens)
        self._filled.clear()

    def _try_to_admit(self, request: Request) -> None:
        kv, knobs = self.kv, self._knobs
        hit = kv.lookup(request)
        num_cached_tokens = len(hit) * kv.block_size
        chunk = self._chunk(request.num_tokens - num_cached_tokens)
        if not chunk:
            self._wait_reason = "budget"
            return
        if knobs.reserve == "none":
            num_needed = kv.num_blocks_taken(num_cached_tokens + chunk, hit)
        elif knobs.reserve == "prompt":
            num_needed = kv.num_blocks_taken(request.num_tokens, hit)
        else:
            # The last token is never computed, hence needs no room.
            num_needed = kv.num_blocks_taken(request.max_num_tokens - 1, hit)
            num_needed += self._num_promised - kv.num_held
        if self.running:
            num_needed += int(knobs.watermark * kv.num_blocks)
        if num_needed > kv.num_free_blocks:
            self._wait_reason = "kv_blocks"
            return
        self.waiting.pop()
        self.running.append(request)
        self._num_promised += self._num_blocks_in_all(request)
        kv.admit(request, hit, num_cached_tokens + chunk)
        kv.register(request, num_cached_tokens + chunk)
        request.num_computed_tokens = num_cached_tokens
        if request.num_preemptions:
            self.resumed_now[request.request_id] = num_cached_tokens
        else:
            request.num_cached_tokens = num_cached_tokens
        self.admitted_now[request.request_id] = num_cached_tokens
        request.status = RequestStatus.RUNNING
        self._events.append(Admitted(request.request_id, num_cached_tokens))
        self._add_prefill(request, num_cached_tokens, chunk)

    def _num_blocks_in_all(self, request: Request) -> int:
        return self.kv.num_blocks_for(request.max_num_tokens - 1)

    def _end(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._num_promised -= self._num_blocks_in_all(request)
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
