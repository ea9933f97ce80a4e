"""`StepPlan`: one step in the making: its rows, what is left of its budget, who was preempted.

A policy (`policies.py`) fills the plan through `advance` and `admit`; the plan keeps the rules that
all policies share. They are vLLM's (v1): a running request that needs a block and finds none
preempts the latest admitted one (by priority: the one served last), itself at worst; nobody is
admitted in a step that preempted; the first waiting request that does not fit ends admission.
"""

from collections.abc import Callable
from functools import partial

from stepscope.engine.config import Knobs
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.request import Request, RequestStatus
from stepscope.engine.step import ScheduledRow
from stepscope.engine.waiting_queue import WaitingQueue, rank
from stepscope.engine.wire import Admitted, Phase, Preempted, RequestEvent

# The constructor of a NamedTuple takes twice as long, which shows at a thousand rows a step.
_new_row: Callable[[tuple[Request, Phase, int, int, bool]], ScheduledRow] = partial(
    tuple.__new__, ScheduledRow
)


class StepPlan:
    """Fills one step. Works on the scheduler's own queues, and lives as long as the step.

    Args:
        running: in order of admission.
        alone: there is only one request, so a long prompt has nobody to starve.
        next_in_turn: the first request whose decode the last step had no budget for.
    """

    def __init__(
        self,
        running: list[Request],
        waiting: WaitingQueue,
        kv: KVCacheManager,
        knobs: Knobs,
        alone: bool,
        next_in_turn: Request | None,
    ) -> None:
        self.running = running
        self.waiting = waiting
        self.next_in_turn = next_in_turn
        self.rows: list[ScheduledRow] = []
        self.budget = knobs.max_num_batched_tokens  # what is left of it
        self.has_preempted = False
        self.wait_reason = "queued"  # why the first waiting request is not admitted
        self.admitted: dict[int, int] = {}  # request id -> tokens of the prefix hit
        self.resumed: dict[int, int] = {}  # ... those of them that had been preempted
        self.events: list[RequestEvent] = []
        self._kv = kv
        self._knobs = knobs
        self._max_chunk = 0 if alone else knobs.long_prefill_token_threshold
        self._filled: list[tuple[Request, int]] = []  # (request, tokens computed after the step)

    def advance(self, requests: list[Request], decodes_only: bool = False) -> list[Request]:
        """Give each running request, in this order, its next tokens while there is budget.

        With `decodes_only`, requests whose prompts are not complete are left out and returned.
        """
        postponed: list[Request] = []
        if decodes_only:
            self.next_in_turn = None
        rows, block_size, decode = self.rows, self._kv.block_size, Phase.DECODE
        last_offset = block_size - 1
        budget = self.budget  # a local, and handed over where others need it: this loop is hot
        for request in requests.copy():
            if budget <= 0:
                if decodes_only:
                    self.next_in_turn = request
                break
            if self.has_preempted and request.status is not RequestStatus.RUNNING:
                continue
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) - start
            if num_tokens == 1 and start >= len(request.prompt_token_ids):
                offset = start % block_size
                if not offset:
                    self.budget = budget
                    fits = self._grow(request, start + 1)
                    budget = self.budget
                    if not fits:
                        break
                if offset == last_offset:
                    self._filled.append((request, start + 1))
                rows.append(_new_row((request, decode, start, 1, True)))
                budget -= 1
            elif decodes_only:
                postponed.append(request)
            else:
                self.budget = budget
                fits = self._advance_prompt(request, start, num_tokens)
                budget = self.budget
                if not fits:
                    break
        self.budget = budget
        return postponed

    def admit(self) -> None:
        """Take in waiting requests while seats, budget and KV blocks last."""
        self.register_filled()
        while self.waiting and self.wait_reason == "queued":
            if self.has_preempted:
                self.wait_reason = "preemption"
            elif len(self.running) >= self._knobs.max_num_seqs:
                self.wait_reason = "seats"
            elif self.budget <= 0:
                self.wait_reason = "budget"
            else:
                self._try_to_admit(self.waiting.peek())
        if self.waiting:
            self.waiting.peek().waiting_reason = self.wait_reason

    def register_filled(self) -> None:
        """Blocks that rows of running requests fill can be hit: no row is withdrawn any more."""
        for request, num_tokens in self._filled:
            if request.status is RequestStatus.RUNNING:
                self._kv.register(request, num_tokens)
        self._filled.clear()

    def _advance_prompt(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give a running request its next chunk; False: there was no room, it preempted itself."""
        chunk = self._chunk(num_tokens)
        if not chunk:
            # Whole prompts only, and this one does not fit beside the others: nobody overtakes it.
            self.wait_reason = "budget"
            return True
        if not self._grow(request, start + chunk):
            return False
        self._filled.append((request, start + chunk))
        self._add_prompt_row(request, start, chunk)
        return True

    def _chunk(self, num_tokens: int) -> int:
        """How many of the `num_tokens` a prompt still needs it gets now; 0: none."""
        if not self._knobs.enable_chunked_prefill:
            return num_tokens if num_tokens <= self.budget else 0
        if 0 < self._max_chunk < num_tokens:
            num_tokens = self._max_chunk
        return min(num_tokens, self.budget)

    def _add_prompt_row(self, request: Request, start: int, num_tokens: int) -> None:
        if start < request.high_water:
            phase = Phase.RECOMPUTE
        elif start >= request.num_prompt_tokens and start + 1 == request.num_tokens:
            phase = Phase.DECODE  # resumed with everything but its newest token still cached
        else:
            phase = Phase.PREFILL
        samples = start + num_tokens == request.num_tokens
        self.rows.append(_new_row((request, phase, start, num_tokens, samples)))
        self.budget -= num_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens`, preempting for it; False: the request preempted itself."""
        while not self._kv.grow(request, num_tokens):
            victim = self.running[-1]
            if self._knobs.policy == "priority":
                victim = max(self.running, key=rank)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take all blocks, and the tokens of this step, from a request; it waits again."""
        self.has_preempted = True
        if self.running[-1] is request:
            self.running.pop()
        else:
            self.running.remove(request)
        for index, row in enumerate(self.rows):
            if row.request is request:
                self.budget += row.num_tokens
                del self.rows[index]
                break
        self.events.append(Preempted(request.request_id, self._kv.free(request), "kv_full"))
        request.status = RequestStatus.PREEMPTED
        request.high_water = max(request.high_water, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend(request)

    def _try_to_admit(self, request: Request) -> None:
        kv = self._kv
        hit = kv.lookup(request)
        num_cached_tokens = len(hit) * kv.block_size
        chunk = self._chunk(request.num_tokens - num_cached_tokens)
        if not chunk:
            self.wait_reason = "budget"
            return
        num_computed_tokens = num_cached_tokens + chunk
        if self._num_blocks_needed(request, hit, num_computed_tokens) > kv.num_free_blocks:
            self.wait_reason = "kv_blocks"
            return
        self.waiting.pop()
        self.running.append(request)
        kv.admit(request, hit, num_computed_tokens)
        kv.register(request, num_computed_tokens)
        if request.num_preemptions:
            self.resumed[request.request_id] = num_cached_tokens
        else:
            request.num_cached_tokens = num_cached_tokens
        self.admitted[request.request_id] = num_cached_tokens
        self.events.append(Admitted(request.request_id, num_cached_tokens))
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        self._add_prompt_row(request, num_cached_tokens, chunk)

    def _num_blocks_needed(self, request: Request, hit: list[int], num_computed_tokens: int) -> int:
        """Free blocks without which a waiting request is not admitted."""
        kv, knobs = self._kv, self._knobs
        if knobs.reserve == "none":
            num_needed = kv.num_blocks_taken(num_computed_tokens, hit)
        elif knobs.reserve == "prompt":
            num_needed = kv.num_blocks_taken(request.num_tokens, hit)
        else:
            num_needed = kv.num_blocks_taken(request.max_num_tokens - 1, hit)
            num_needed += kv.num_outstanding_blocks
        if self.running:
            num_needed += int(knobs.watermark * kv.num_blocks)
        return num_needed
