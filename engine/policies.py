"""How the token budget of one step is spent: one function a policy.

A policy says in which order requests get their share; everything policies have in common (chunk
sizes, blocks, preemption, admission) stands once in `StepPlan`. A policy admits last: a request
admitted in a step is never preempted in it, so the next one admitted may hit blocks it fills.
"""

from collections.abc import Callable
from typing import TypeAlias

from stepscope.engine.config import Order
from stepscope.engine.request import Request, RequestStatus
from stepscope.engine.step_plan import StepPlan

SpendBudget: TypeAlias = Callable[[StepPlan], None]


def arrival(plan: StepPlan) -> None:
    """Strictly in order of admission, prompts and decodes alike (vLLM v1).

    A budget below the number of running requests serves the first ones until they finish.
    """
    plan.advance(plan.running)
    plan.admit()


def decode_first(plan: StepPlan) -> None:
    """Decodes before prompt chunks, so that a long prompt delays no token (Sarathi-Serve).

    A budget below the number of decodes goes round, beginning where the last step ended; prompts
    wait until decodes finish then.
    """
    prompts = plan.advance(_in_turn(plan), decodes_only=True)
    plan.advance(prompts)
    plan.admit()


def _in_turn(plan: StepPlan) -> list[Request]:
    first = plan.next_in_turn
    if first is None or first.status is not RequestStatus.RUNNING:
        return plan.running
    position = plan.running.index(first)
    return plan.running[position:] + plan.running[:position]


POLICIES: dict[Order, SpendBudget] = {"arrival": arrival, "decode_first": decode_first}
