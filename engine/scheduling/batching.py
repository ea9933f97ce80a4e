"""How the token budget of one step is spent: one function a batching mode.

A mode says which requests get their share, and in which order; everything modes have in common
(chunk sizes, blocks, preemption, admission) stands once in `StepPlan`. Every mode looks at the
state it finds, so that any of them can take over from any other between two steps. A mode admits
last: a request admitted in a step is never preempted in it, so the next one admitted may hit
blocks it fills.

`order` decides over a step that mixes prompts and decodes (`chunked`); the other modes have an
order of their own, and it only says whom a budget below the number of decodes serves.
"""

from collections.abc import Callable
from typing import TypeAlias

from stepscope.engine.protocol.settings.knobs import Batching
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step_plan import StepPlan

SpendBudget: TypeAlias = Callable[[StepPlan], None]


def naive(plan: StepPlan) -> None:
    """One request at a time, from its prompt to its last token (a loop around `generate`).

    Requests that run when this mode is switched on are finished one after the other.
    """
    plan.whole_prompts = True
    plan.advance(plan.running[:1])
    if plan.running:
        plan.wait_reason = "batch"
    plan.admit(num_seats=1)


def static(plan: StepPlan) -> None:
    """Fill a batch, pad it, run it to its end; only then the next one (Hugging Face `generate`).

    The members move in lockstep through a rectangle of tokens, one row a member, padded on the
    left: all prompts end in the same step, and all decode from there on. Who has ended, or was
    preempted, leaves its row empty until the last one is done. A rectangle wider than the budget
    is computed in slices of as many columns as the budget has for each row (the
    `prefill_chunk_size` of `generate`); with enable_chunked_prefill=false a batch is only as large
    as a single slice.

    Padding counts against the budget, for it bounds what such an engine computes in a step, but
    no runner has to compute it: ours packs its rows. `StepPlan.num_padded_tokens` says what a
    padding engine would have computed in vain.
    """
    if plan.running:
        plan.wait_reason = "batch"
    else:
        plan.form_batch()
    missing = [request.num_tokens - request.num_computed_tokens for request in plan.running]
    longest = max(missing, default=0)
    plan.num_slots = max(plan.num_slots, len(missing))
    if longest == 1:
        plan.advance(_prompts(plan))  # a last token each; in a batch of ours all end together
        plan.advance(_decodes(plan), decodes_only=True)
    elif plan.whole_prompts and longest * plan.num_slots > plan.budget:
        plan.advance(_prompts(plan))  # no batch of ours: taken over from another mode
    elif longest:
        num_columns = min(longest, max(1, plan.budget // plan.num_slots))
        plan.advance_to(longest - num_columns)
    plan.pad()


def continuous(plan: StepPlan) -> None:
    """Admit and release in every step, but prompts are whole, and all decodes wait for them.

    The order of vLLM before chunked prefill (0.1 to 0.3, 2023; Sarathi-Serve, section 3.1): as
    long as a prompt can be admitted, a step is prompts only; else it is decodes only. A prompt
    longer than the budget takes several steps in a row, alone in each.
    """
    plan.whole_prompts = True
    separate(plan)


def separate(plan: StepPlan) -> None:
    """Prompts in chunks, but no step has both chunks and decodes (Mini-SGLang): chunks first."""
    plan.advance(_prompts(plan))
    plan.admit()
    if not plan.rows:
        plan.advance(_decodes(plan), decodes_only=True)


def chunked(plan: StepPlan) -> None:
    """Decodes and prompt chunks share the step under one budget.

    By `decode_first`, a long prompt delays no token (Sarathi-Serve, algorithm 3), and a budget
    below the number of decodes goes round, beginning where the last step ended. By `arrival`, all
    are served strictly in order of admission, prompts and decodes alike (vLLM v1), and such a
    budget serves the first ones until they finish.
    """
    if plan.order == "arrival":
        plan.advance(plan.running)
    else:
        plan.advance(plan.advance(_decodes(plan), decodes_only=True))
    plan.admit()


def _prompts(plan: StepPlan) -> list[Request]:
    """Those that miss more than their newest token, of the prompt or of what is recomputed."""
    return [
        request
        for request in plan.running
        if request.num_computed_tokens + 1 < len(request.token_ids)
        or request.num_computed_tokens < len(request.prompt_token_ids)
    ]


def _decodes(plan: StepPlan) -> list[Request]:
    """All that run, in the order in which their decodes are served."""
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
