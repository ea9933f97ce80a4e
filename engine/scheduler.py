"""`Scheduler`: who waits, who runs, and what the tokens of a step change.

The scheduler owns the queues and the life of a request; a `StepPlan` decides one step, as a
batching mode (`policies.py`) asks it to; the `KVCacheManager` owns the blocks. `schedule` and
`update` alternate: all tokens of a step are known before the next one is scheduled, and
`Request.num_computed_tokens` advances in `update`. Knobs are read at the top of a step, so that
any of them may change between two steps.
"""

from stepscope.engine.config import ConfigError, Knobs, Limits
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request, RequestStatus
from stepscope.engine.step import ScheduledRow
from stepscope.engine.step_plan import StepPlan
from stepscope.engine.waiting_queue import WaitingQueue
from stepscope.engine.wire import Aborted, Finished, FirstToken, Phase, RequestEvent


class Scheduler:
    """Decides over every step of one KV cache, in the batching mode that the knobs name.

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
        self._events: list[RequestEvent] = []
        self.num_prefill_tokens = 0  # of the last step, recomputed ones included
        self.num_decode_tokens = 0
        self.num_padded_tokens = 0  # ... and what a padding engine would compute besides
        self._next_in_turn: Request | None = None
        self._num_slots = 0
        self._wait_reason = "queued"
        self.knobs = knobs

    @property
    def knobs(self) -> Knobs:
        """Settings in force. Replaced between steps; they have passed `Knobs.check`."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self.waiting.reorder(knobs.policy)
        self.kv.enable_prefix_caching = knobs.enable_prefix_caching
        if knobs.batching != "static":
            self._num_slots = 0

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

        `seats` (max_num_seqs), `budget` (tokens of the step), `preemption` (a step that preempted
        admits nobody) and `batch` (in the modes `naive` and `static`: what runs has to end first)
        hold up all that wait; `kv_blocks` holds up the first, and the others are `queued` behind
        it.
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

        At most `max_num_batched_tokens` tokens in all, `num_padded_tokens` included. Empty when
        there is nothing to do, and in the rare step in which whoever was to be served preempted
        itself: there is still work then.
        """
        plan = StepPlan(
            self.running,
            self.waiting,
            self.kv,
            self._knobs,
            alone=len(self.requests) <= 1,
            next_in_turn=self._next_in_turn,
            num_slots=self._num_slots,
        )
        POLICIES[self._knobs.batching](plan)
        plan.register_filled()
        self.admitted_now, self.resumed_now = plan.admitted, plan.resumed
        self.num_prefill_tokens = plan.num_prefill_tokens
        self.num_decode_tokens = plan.num_tokens - plan.num_prefill_tokens
        self.num_padded_tokens, self._num_slots = plan.num_padded_tokens, plan.num_slots
        self._next_in_turn, self._wait_reason = plan.next_in_turn, plan.wait_reason
        self._events += plan.events
        return plan.rows

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
            if (
                len(tokens) >= request.max_num_tokens
                or token_id in request.end_token_ids
                or request.stop_text is not None
            ):
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

    def _end(self, request: Request, reason: str) -> None:
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
