"""How the token budget of one step is spent: one function a policy.

A policy says in which order requests get their share; everything policies have in common (chunk
sizes, blocks, preemption, admission) stands once in the scheduler and is reached through
`Spending`. A policy admits last: a request admitted in a step is never preempted in it, so blocks
its prompt fills may be hit by the next one admitted.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from stepscope.engine.config import Order
from stepscope.engine.request import Request, RequestStatus


class Spending(Protocol):
    """What a policy may do with the budget of the step at hand."""

    running: list[Request]  # in order of admission
    starved: list[Request]  # whose prompts are complete and who got nothing in the last step

    def advance(self, requests: list[Request], decodes_only: bool = False) -> list[Request]:
        """Give each request, in this order, its next tokens while there is budget.

        With `decodes_only`, requests whose prompts are not complete are left out and returned.
        """
        ...

    def admit(self) -> None:
        """Take in waiting requests while seats, budget and KV blocks last."""
        ...


PolicyFunction: TypeAlias = Callable[[Spending], None]


def arrival(step: Spending) -> None:
    """Strictly in order of admission, prompts and decodes alike (vLLM v1).

    A budget below the number of running requests serves the first ones until they finish.
    """
    step.advance(step.running)
    step.admit()


def decode_first(step: Spending) -> None:
    """Decodes before prompt chunks, so that a long prompt delays no token (Sarathi-Serve).

    A budget below the number of decodes goes round: who got nothing in the last step comes first.
    Prompts wait until decodes finish then.
    """
    prompts = step.advance(_starved_first(step), decodes_only=True)
    step.advance(prompts)
    step.admit()


def _starved_first(step: Spending) -> list[Request]:
    starved = [r for r in step.starved if r.status is RequestStatus.RUNNING]
    if not starved:
        return step.running
    request_ids = {r.request_id for r in starved}
    return starved + [r for r in step.running if r.request_id not in request_ids]


POLICIES: dict[Order, PolicyFunction] = {"arrival": arrival, "decode_first": decode_first}
