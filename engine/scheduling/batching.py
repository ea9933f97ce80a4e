"""Batching modes: how to spend the token budget of one step. Each mode is one function.

A mode says which requests get tokens, and in which order. What all modes share (chunk sizes,
blocks, preemption, admission) is in `StepPlan`. Modes keep no state of their own, so any mode can
take over from any other between two steps.

Each mode serves running requests first and admits new ones last. So a request is never preempted in
the step that admits it, and requests admitted later in that step may hit the blocks that it fills.

In the mode `chunked`, whose steps mix prompts and decodes, the knob `order` says which come first.
The other modes have an order of their own; there the knob only decides which decodes run if the
budget is too small for all.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from stepscope.engine.protocol.knobs import Batching
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.engine.scheduling.step_plan import StepPlan

SpendBudget: TypeAlias = Callable[[StepPlan], None]


def naive(plan: StepPlan) -> None:
    """Run one request at a time, from its prompt to its last token (a loop around `generate`)."""
    plan.whole_prompts = True
    plan.advance(plan.running[:1])
    if plan.running:
        plan.wait_reason = "batch"
    plan.admit(num_seats=1)


def static(plan: StepPlan) -> None:
    """Fill a batch, pad it, run it to its end, then fill the next one (Hugging Face `generate`).

    The requests of a batch move in lockstep through a rectangle of tokens, one row for each
    request, padded on the left: all prompts end in the same step, and all decode after it. The row
    of a request that ends or is preempted stays empty until the last request of the batch has
    ended. A rectangle that exceeds the budget is computed in slices of as many columns as the
    budget allows (the `prefill_chunk_size` of `generate`). With enable_chunked_prefill=false a
    batch is no larger than one slice.

    Padding counts against the budget, because an engine that pads computes it. Our runner packs its
    rows and computes no padding: `StepPlan.num_padded_tokens` is what a padding engine would have
    computed in vain.
    """
    if plan.running:
        plan.wait_reason = "batch"
    else:
        plan.form_batch()
    missing = [request.num_tokens - request.num_computed_tokens for request in plan.running]
    longest = max(missing, default=0)
    plan.num_slots = max(plan.num_slots, len(missing))
    if longest == 1:
        plan.advance(_prompts(plan))  # each prompt's last token; in our batches all end together
        plan.advance(_decodes(plan), decodes_only=True)
    elif plan.whole_prompts and longest * plan.num_slots > plan.budget:
        plan.advance(_prompts(plan))  # requests that another mode admitted: too large for one slice
    elif longest:
        num_columns = min(longest, max(1, plan.budget // plan.num_slots))
        plan.advance_to(longest - num_columns)
    plan.pad()


def continuous(plan: StepPlan) -> None:
    """Admit and finish requests in every step, but run prompts whole, in steps without decodes.

    This is the order of vLLM before chunked prefill (0.1 to 0.3, 2023; Sarathi-Serve, section 3.1).
    As long as a prompt can be admitted, a step has only prompts; otherwise it has only decodes. A
    prompt longer than the budget takes several steps in a row, alone in each.
    """
    plan.whole_prompts = True
    separate(plan)


def separate(plan: StepPlan) -> None:
    """Run prompts in chunks, and decodes only in steps without a chunk (Mini-SGLang)."""
    decodes = plan.without_held(_decodes(plan))
    if not plan.holds_prefills:
        plan.advance(_prompts(plan))
    plan.admit()
    if not plan.rows:
        plan.advance(decodes, decodes_only=True)


def chunked(plan: StepPlan) -> None:
    """Run decodes and prompt chunks in the same step, under one budget.

    With the knob `order` at `decode_first`, a long prompt delays no decode (Sarathi-Serve,
    algorithm 3). If the budget is below the number of decodes, each step begins with the request at
    which the step before it stopped. With `arrival`, prompts and decodes are served strictly in
    order of admission (vLLM v1); a budget below the number of decodes then serves the first
    requests until they finish.
    """
    if plan.holds_prefills:
        plan.advance(plan.without_held(_decodes(plan)), decodes_only=True)
    elif plan.order == "arrival":
        plan.advance(plan.running)
    else:
        plan.advance(plan.advance(_decodes(plan), decodes_only=True))
    plan.admit()


def _prompts(plan: StepPlan) -> list[Request]:
    return [
        request
        for request in plan.running
        if request.num_computed_tokens + 1 < len(request.token_ids)
        or request.num_computed_tokens < len(request.prompt_token_ids)
    ]


def _decodes(plan: StepPlan) -> list[Request]:
    """Return all running requests, in the order in which their decodes are served."""
    first = plan.next_in_turn
    if plan.order == "arrival" or first is None or first.status is not RequestStatus.RUNNING:
        return plan.running
    position = plan.running.index(first)
    return plan.running[position:] + plan.running[:position]


BATCHING_MODES: dict[Batching, SpendBudget] = {
    "naive": naive,
    "static": static,
    "continuous": continuous,
    "separate": separate,
    "chunked": chunked,
}


@dataclass(eq=False)
class PrefillCadence:
    """Which steps leave prefills out, by the knob `prefill_schedule_interval`.

    The rules are those of vLLM 0.33 (pull requests 44558 and 54627):
    - The interval counts steps from the last one that computed prompt tokens.
    - Prefills are held only while a request decodes, which then has the step for itself.
    - If a step that took prefills leaves requests in the queue, prefills are held no more until one
      empties it: else a queue that grows would be served in one step of each interval alone.
    """

    _num_steps: int | None = None  # since the last with prefills; None: there was none
    _is_backed_up: bool = False

    def holds(self, interval: int, running: Iterable[Request], ending: Collection[Request]) -> bool:
        """Whether the next step leaves prefills out.

        Args:
            ending: requests of `running` that get no row in it.
        """
        if interval == 1 or self._is_backed_up or self._num_steps is None:
            return False
        return self._num_steps + 1 < interval and any(
            request.is_decoding for request in running if request not in ending
        )

    def note(self, rows: Iterable[ScheduledRow], *, has_queue: bool | None) -> None:
        """Take account of a step that was scheduled.

        Args:
            rows: may be empty if none computes prompt tokens. A request that is admitted with a
                single token left counts as a decode.
            has_queue: whether requests still wait after it; None if it admitted none on purpose.
        """
        if has_queue is not None:
            self._is_backed_up = has_queue
        if any(
            row.num_tokens > 1 or not row.samples or row.start > row.request.num_cached_tokens
            for row in rows
            if row.phase is not Phase.DECODE
        ):
            self._num_steps = 0
        elif self._num_steps is not None:
            self._num_steps += 1

    def skip(self, num_steps: int, interval: int, *, has_queue: bool) -> None:
        """Take account of steps without prefills that were not scheduled one by one."""
        if self._num_steps is not None:
            self._num_steps += num_steps
        is_free = self._num_steps is None or self._num_steps >= interval
        if is_free or self._is_backed_up:  # at least one of them would have taken prefills
            self._is_backed_up = has_queue
