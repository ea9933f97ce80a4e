"""`Preemption`: what a request lost, to whom, and what it took to compute it again."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.engine.protocol.wire import Preempted, RequestView, StepRecord
from stepscope.recordings.state.session import SessionState

# It waits to be admitted; its tokens are computed again; all of them are; it ended before;
# messages are missing.
PreemptionStatus: TypeAlias = Literal["waits", "recomputes", "back", "ended", "unknown"]

_NO_BLOCKS = frozenset({"kv_full", "out of KV blocks"})  # our reason, and vLLM's


@dataclass(slots=True)
class Preemption:
    """One preemption. None is unknown.

    Attributes:
        step: None: before the first message.
        beneficiary: the request that needed its blocks, may be itself; None also where none did.
        num_lost: tokens of its KV cache that were given up.
        num_from_cache: those of them that the prefix cache still had when it was admitted again.
        num_recomputed: those that were computed again so far, in `num_steps` steps.
        recompute_ns: what that took; the time of a step is divided by its tokens.
        waited_ns: until it was admitted again.
    """

    request_id: int
    client_id: str
    step: int | None = None
    time_ns: int | None = None
    reason: str = ""
    num_blocks: int | None = None
    beneficiary: int | None = None
    num_lost: int | None = None
    num_from_cache: int = 0
    num_recomputed: int = 0
    num_steps: int = 0
    recompute_ns: float = 0.0
    waited_ns: int | None = None
    status: PreemptionStatus = "waits"


def lost_between(preemptions: list[Preemption], start: int, end: int) -> list[int]:
    """How many of the positions from `start` to `end` each preemption lost.

    A position that was lost twice counts for the later one.

    Args:
        preemptions: of one request, oldest first.
    """
    counts = []
    floor = start
    for each in reversed(preemptions):
        limit = end if each.num_lost is None else min(end, each.num_lost)
        counts.append(max(0, limit - floor))
        floor = max(floor, limit)
    return counts[::-1]


def beneficiaries(record: StepRecord, before: SessionState) -> dict[int, int | None]:
    """Victim -> the request for which it was preempted in a step, as the record carries it.

    Rows are in the order of scheduling. So a victim goes to the first row that needs more blocks
    than are free until then; a victim that no row needs wanted a block for itself.

    Args:
        before: the state right before the step.
    """
    preempted = [event for event in record.events if isinstance(event, Preempted)]
    found: dict[int, int | None] = dict.fromkeys(event.request_id for event in preempted)
    if record.batch is None or before.kv is None:
        return found
    views = before.requests
    victims = deque(event for event in preempted if event.reason in _NO_BLOCKS)
    num_free = before.kv.cached + before.kv.empty
    # A victim may have got blocks in this step before it lost them.
    num_needed = sum(each.num_blocks - _num_held(views, each.request_id) for each in victims)
    for row in record.batch:
        num_needed += row.num_blocks - _num_held(views, row.request_id)
        while victims and num_needed > num_free:
            victim = victims.popleft()
            found[victim.request_id] = row.request_id
            num_needed -= victim.num_blocks - _num_held(views, victim.request_id)
            num_free += _num_held(views, victim.request_id)
    return found | {victim.request_id: victim.request_id for victim in victims}


def _num_held(views: Mapping[int, RequestView], request_id: int) -> int:
    view = views.get(request_id)
    return 0 if view is None else view.num_blocks
