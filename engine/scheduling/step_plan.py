"""`StepPlan`: a step while it is being planned: its rows, its remaining budget, its preemptions.

A batching mode (`batching.py`) fills the plan through `advance` and `admit`. The plan applies the
rules that all modes share, which are vLLM's (v1):
- A running request that needs a block when none is free preempts the request that was admitted
  last, in the worst case itself. With the policy `priority` it preempts
  the running request that `waiting_queue.rank` puts last.
- A step with a preemption admits no request.
- The first waiting request that does not fit ends admission.

With overlap, a plan is made while the step before it is in flight. It counts that step's tokens as
present. It preempts no request, because it is only made if there are blocks for all running
requests (`Scheduler.can_run_ahead`).
"""

import time
from collections.abc import Callable, Collection
from functools import partial

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Admitted, Phase, Preempted, RequestEvent
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.ngram import NgramProposer
from stepscope.engine.scheduling.request import Request, RequestStatus, WaitingQueue, rank
from stepscope.engine.scheduling.step import KVReceiver, ScheduledRow

# The constructor of a NamedTuple is half as fast, which shows at a thousand rows a step.
_new_row: Callable[[tuple[Request, Phase, int, int, bool]], ScheduledRow] = partial(
    tuple.__new__, ScheduledRow
)


class StepPlan:
    """Plans one step. Changes the scheduler's own queues; is discarded after the step.

    Args:
        running: in order of admission.
        alone: whether there is only one request, so that a long prompt delays no other.
        next_in_turn: the first request whose decode had no budget in the step before.
        num_slots: rows of the current static batch, with those of requests that have ended.
        ending: requests that get their last token from the step in flight, so they get no row.
        proposer: guesses the next tokens of decodes; None: nothing is guessed.
        receiver: loads keys and values that a prefill engine hands over; None if this engine takes
            no such requests.
        wait_reason: why this step may admit no request; "queued" if it may.
        holds_prefills: whether it leaves prefills out (`PrefillCadence`), in modes that share
            steps or take turns.
    """

    def __init__(
        self,
        running: list[Request],
        waiting: WaitingQueue,
        kv: KVCacheManager,
        knobs: Knobs,
        alone: bool,
        next_in_turn: Request | None,
        num_slots: int,
        ending: Collection[Request] = (),
        proposer: NgramProposer | None = None,
        receiver: KVReceiver | None = None,
        wait_reason: str = "queued",
        holds_prefills: bool = False,
    ) -> None:
        self.running = running
        self.waiting = waiting
        self.next_in_turn = next_in_turn
        self.num_slots = num_slots
        self.order = knobs.order
        self.holds_prefills = holds_prefills
        self.has_held = False  # a prefill, for that
        self.whole_prompts = not knobs.enable_chunked_prefill
        self.rows: list[ScheduledRow] = []
        self.num_prefill_tokens = 0  # of the rows, recomputed ones included
        self.num_padded_tokens = 0  # of a static batch; within the budget, like the rows
        self.budget = knobs.max_num_batched_tokens  # tokens that are left of it
        self.has_preempted = False
        self.wait_reason = wait_reason  # why the first waiting request is not admitted
        self.admitted: dict[int, int] = {}  # request id -> tokens that were cached
        self.loaded: list[Request] = []  # those of them whose keys and values were handed over
        self.resumed: dict[int, int] = {}  # as `admitted`, for those whose tokens were lost
        self.overtaken: list[Request] = []  # by those admitted, which have a higher priority
        self.events: list[RequestEvent] = []
        self._kv = kv
        self._knobs = knobs
        self._max_chunk = 0 if alone else knobs.long_prefill_token_threshold
        self._ending = ending
        self._proposer = proposer
        self._receiver = receiver
        self._num_spare_tokens = 0  # budget that is left for drafts
        self.num_draft_tokens = 0  # of the rows
        self._filled: list[tuple[Request, int]] = []  # (request, tokens computed after the step)
        self.filled_later: list[tuple[Request, int]] = []  # the same, if the last token is unknown

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled so far."""
        return self._knobs.max_num_batched_tokens - self.budget

    def advance(self, requests: list[Request], decodes_only: bool = False) -> list[Request]:
        """Give running requests their next tokens, in the given order, while there is budget.

        With `decodes_only`, leaves out requests that still have prompt tokens to compute, and
        returns them.
        """
        postponed: list[Request] = []
        if decodes_only:
            self.next_in_turn = None
        rows, block_size, decode = self.rows, self._kv.block_size, Phase.DECODE
        last_offset = block_size - 1
        budget = self.budget  # a local for speed; written back before calls that use it
        going_on = [r for r in requests if r not in self._ending] if self._ending else [*requests]
        has_drafts = self._proposer is not None
        self._num_spare_tokens = budget - len(going_on) if decodes_only else budget
        for request in going_on:
            if budget <= 0:
                if decodes_only:
                    self.next_in_turn = request
                break
            if self.has_preempted and request.status is not RequestStatus.RUNNING:
                continue
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) - start
            # num_tokens is 0 if the token to decode is still to come from the step in flight.
            if num_tokens <= 1 and start >= len(request.prompt_token_ids):
                if has_drafts:
                    self.budget = budget
                    fits = self._advance_with_drafts(request, start)
                    budget = self.budget
                    if not fits:
                        break
                    continue
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

    def _advance_with_drafts(self, request: Request, start: int) -> bool:
        """Give a decode its newest token and drafts. False if the request preempted itself.

        With the knob `order` at `decode_first`, drafts get only the budget and the free blocks that
        no decode needs. With `arrival` they are tokens like others, and may preempt requests (vLLM
        v1).
        """
        assert self._proposer is not None
        drafts = self._proposer.propose(request, min(self.budget - 1, self._num_spare_tokens))
        if self.order != "arrival":
            drafts = drafts[: self._kv.num_tokens_without_preemption(request) - start - 1]
        if not self._grow(request, start + 1 + len(drafts)):
            return False
        request.draft_token_ids = drafts
        self._filled.append((request, start + 1))
        self.rows.append(_new_row((request, Phase.DECODE, start, 1 + len(drafts), True)))
        self.num_draft_tokens += len(drafts)
        self._num_spare_tokens -= len(drafts)
        self.budget -= 1 + len(drafts)
        return True

    def without_held(self, requests: list[Request]) -> list[Request]:
        """Return running requests, in a step that holds prefills without those that have some."""
        if not self.holds_prefills:
            return requests
        decodes = [request for request in requests if request.is_decoding]
        self.has_held = len(decodes) < len(requests)
        return decodes

    def advance_to(self, num_missing: int) -> None:
        """Give each running request the tokens that it lacks, except the last `num_missing`."""
        for request in self.running.copy():
            start = request.num_computed_tokens
            num_tokens = request.num_tokens - start - num_missing
            if num_tokens <= 0 or request.status is not RequestStatus.RUNNING:
                continue
            if num_tokens > self.budget or not self._advance_by(request, start, num_tokens):
                break

    def admit(self, num_seats: int | None = None) -> None:
        """Admit waiting requests while max_num_seqs, budget and KV blocks allow.

        Does nothing if there is already a `wait_reason`.

        Args:
            num_seats: running requests, at most; None: max_num_seqs alone counts.
        """
        self.register_filled()
        while self._has_room(num_seats):
            self._try_to_admit(self.waiting.peek())

    def form_batch(self) -> None:
        """Admit as many waiting requests as can run as one padded batch, without rows yet.

        Each gets the blocks of its whole prompt. Each needs one token of the budget, or as many as
        the longest prompt if prompts must not be cut.
        """
        self.num_slots = longest = 0
        while self._has_room():
            request = self.waiting.peek()
            hit = self._kv.lookup(request)
            longest = max(longest, request.num_tokens - len(hit) * self._kv.block_size)
            width = longest if self.whole_prompts else 1
            if (len(self.running) + 1) * width > self.budget:
                self.wait_reason = "budget"
            elif self._may_enter(request, hit, request.num_tokens):
                self._enter(request, hit, request.num_tokens)

    def pad(self) -> None:
        """Set `num_padded_tokens`, which fill all rows and empty slots up to the longest row.

        The padding is cut off at the budget.
        """
        if self.rows:
            size = self.num_slots * max(row.num_tokens for row in self.rows)
            self.num_padded_tokens = min(size - self.num_tokens, self.budget)

    def register_filled(self) -> None:
        """Register the blocks that the rows fill. Call it when no row can be preempted any more."""
        for request, num_tokens in self._filled:
            if num_tokens > len(request.token_ids):
                self.filled_later.append((request, num_tokens))
            elif request.status is RequestStatus.RUNNING:
                self._kv.register(request, num_tokens)
        self._filled.clear()

    def _advance_prompt(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give a running request the next chunk of its prompt. False if it preempted itself."""
        chunk = self._chunk(num_tokens)
        if not chunk:
            # It must run whole and does not fit into this step; no waiting request overtakes it.
            self.wait_reason = "budget"
            return True
        return self._advance_by(request, start, chunk)

    def _advance_by(self, request: Request, start: int, num_tokens: int) -> bool:
        if not self._grow(request, start + num_tokens):
            return False
        self._filled.append((request, start + num_tokens))
        self._add_row(request, start, num_tokens)
        return True

    def _chunk(self, num_tokens: int) -> int:
        """Size of the next chunk of a prompt that still needs `num_tokens`; 0 if none fits."""
        if self.whole_prompts:
            if num_tokens <= self.budget:
                return num_tokens
            # If it is longer than the whole budget, it runs in pieces, alone in each step.
            in_pieces = self._knobs.enable_chunked_prefill and not self.rows
            return self.budget if in_pieces else 0
        if 0 < self._max_chunk < num_tokens:
            num_tokens = self._max_chunk
        return min(num_tokens, self.budget)

    def _add_row(self, request: Request, start: int, num_tokens: int) -> None:
        if start < request.high_water:
            phase = Phase.RECOMPUTE
        elif start >= request.num_prompt_tokens and start + 1 == request.num_tokens:
            phase = Phase.DECODE  # resumed, and all but its newest token was still cached
        else:
            phase = Phase.PREFILL
        if phase is not Phase.DECODE:
            self.num_prefill_tokens += num_tokens
        samples = start + num_tokens == request.num_tokens
        self.rows.append(_new_row((request, phase, start, num_tokens, samples)))
        self.budget -= num_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get a request blocks for its first `num_tokens` tokens, by preemption if none are free.

        Returns False if the request preempted itself.
        """
        while not self._kv.grow(request, num_tokens):
            victim = self.running[-1]
            if self._knobs.policy == "priority":
                victim = max(self.running, key=rank)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Preempt a request: take its blocks and its row in this step, and queue it again."""
        self.has_preempted = True
        if self.running[-1] is request:
            self.running.pop()
        else:
            self.running.remove(request)
        for index, row in enumerate(self.rows):
            if row.request is request:
                self.budget += row.num_tokens
                self.num_draft_tokens -= len(request.draft_token_ids)
                if row.phase is not Phase.DECODE:
                    self.num_prefill_tokens -= row.num_tokens
                del self.rows[index]
                break
        self.events.append(Preempted(request.request_id, self._kv.free(request), "kv_full"))
        request.preempt()
        self.waiting.prepend(request)

    def _has_room(self, num_seats: int | None = None) -> bool:
        """Whether this step may admit one more request; if not, sets `wait_reason`."""
        if not self.waiting:
            return False
        if self.wait_reason == "queued":
            if self.has_preempted:
                self.wait_reason = "preemption"
            elif len(self.running) >= self._knobs.max_num_seqs:
                self.wait_reason = "seats"
            elif num_seats is not None and len(self.running) >= num_seats:
                self.wait_reason = "batch"
            elif self.budget <= 0:
                self.wait_reason = "budget"
            elif self.loaded and self.waiting.peek().ticket is not None:
                self.wait_reason = "transfer"  # one in each step: copying delays the step
        return self.wait_reason == "queued"

    def _try_to_admit(self, request: Request) -> None:
        hit = self._kv.lookup(request)
        start = len(hit) * self._kv.block_size
        chunk = self._chunk(request.num_tokens - start)
        if request.ticket is not None:
            self._try_to_load(request, hit)
        elif self.holds_prefills and start + 1 < request.num_tokens:
            self.wait_reason, self.has_held = "cadence", True
        elif not chunk:
            self.wait_reason = "budget"
        elif self._may_enter(request, hit, start + chunk):
            self._enter(request, hit, start + chunk)
            self._kv.register(request, start + chunk)
            self._add_row(request, start, chunk)

    def _try_to_load(self, request: Request, hit: list[int]) -> None:
        """Admit a request that a prefill engine handed over, if there are blocks for it.

        If its keys and values can be loaded, it gets a row in this step.
        """
        if not self._may_enter(request, hit, request.num_tokens):
            return
        self._enter(request, hit, request.num_tokens)
        start = request.num_computed_tokens
        if start == request.num_tokens - 1:
            self._kv.register(request, request.num_tokens)
            self._add_row(request, start, 1)

    def _may_enter(self, request: Request, hit: list[int], num_tokens: int) -> bool:
        """Whether there are blocks to admit the first waiting request; if not, sets `wait_reason`.

        Args:
            hit: its cached blocks.
            num_tokens: tokens that will be computed after this step, those of the hit included.
        """
        if self._num_blocks_needed(request, hit, num_tokens) > self._kv.num_free_blocks:
            self.wait_reason = "kv_blocks"
            return False
        return True

    def _enter(self, request: Request, hit: list[int], num_tokens: int) -> None:
        """Move the first waiting request to `running`, with blocks for `num_tokens`."""
        self.waiting.remove(request)
        self.running.append(request)
        misses = self._kv.admit(request, hit, num_tokens)
        num_cached_tokens = len(hit) * self._kv.block_size
        if not request.comes_back:
            request.num_cached_tokens = num_cached_tokens
        elif request.ticket is None:
            self.resumed[request.request_id] = num_cached_tokens
        self.admitted[request.request_id] = num_cached_tokens
        request.status = RequestStatus.RUNNING
        request.was_overtaken = False
        if self._knobs.policy == "priority":
            self.overtaken += self.waiting.overtake(request)
        request.num_computed_tokens = num_cached_tokens
        load_ns = 0
        if request.ticket is not None:
            load_ns = self._load(request, len(hit))
        num_loaded_tokens = request.num_computed_tokens - num_cached_tokens
        self.events.append(
            Admitted(request.request_id, num_cached_tokens, num_loaded_tokens, load_ns, misses)
        )

    def _load(self, request: Request, num_hit_blocks: int) -> int:
        """Load the keys and values of a handed-over request, except those of prefix hits.

        If that fails, its tokens are recomputed.

        Returns the time it took, in ns.
        """
        assert self._receiver is not None, "only an engine with a receiver takes such requests"
        assert request.ticket is not None
        start_ns = time.monotonic_ns()
        blocks = request.block_table[: len(request.ticket.frames)]
        if self._receiver.load(request.ticket, blocks, num_hit_blocks):
            request.num_computed_tokens = request.num_tokens - 1
        request.ticket = None
        self.loaded.append(request)
        return time.monotonic_ns() - start_ns

    def _num_blocks_needed(self, request: Request, hit: list[int], num_computed_tokens: int) -> int:
        """Number of blocks that must be free to admit a waiting request, by the knob `reserve`."""
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
