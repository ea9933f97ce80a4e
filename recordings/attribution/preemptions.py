"""`Preemption`: what a request lost, to which request, and the cost to recompute it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.engine.protocol.wire import Preempted, RequestView, StepRecord
from stepscope.recordings.state.session import SessionState

# In order: the request waits to be admitted again; its tokens are being recomputed; all are
# recomputed; it ended before that; unknown, because messages are missing.
PreemptionStatus: TypeAlias = Literal["waits", "recomputes", "back", "ended", "unknown"]

NO_BLOCKS = frozenset({"kv_full", "out of KV blocks"})  # our reason, and vLLM's


@dataclass(slots=True)
class Preemption:
    """One preemption. None is unknown.

    Attributes:
        step: None if it happened before the first message.
        beneficiary: the request that needed its blocks, which may be the preempted request itself;
            None also if no request needed them.
        num_lost: tokens in its KV cache before the preemption.
        num_from_cache: lost tokens that the prefix cache still had at the next admission.
        num_recomputed: lost tokens that were recomputed so far, in `num_steps` steps.
        recompute_ns: time spent on recomputing; the time of a step is divided equally among its
            tokens.
        waited_ns: time until it was admitted again.
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
    """For each preemption, how many of the positions [start, end) it lost.

    A position that was lost twice counts for the later preemption.

    Args:
        preemptions: all of one request, oldest first.
    """
    counts = []
    floor = start
    for each in reversed(preemptions):
        limit = end if each.num_lost is None else min(end, each.num_lost)
        counts.append(max(0, limit - floor))
        floor = max(floor, limit)
    return counts[::-1]


def beneficiaries(record: StepRecord, before: SessionState) -> dict[int, int | None]:
    """For each request preempted in a step, the request that needed its blocks.

    This is derived from the record of the step. Rows are in the order of scheduling, so a preempted
    request is charged to the first row that needs more blocks than are free by then. If no row
    needed its blocks, it was preempted for its own next block. None for other reasons of
    preemption, and if the engine does not publish batches or KV counts.

    Args:
        before: the state right before the step.
    """
    preempted = [event for event in record.events if isinstance(event, Preempted)]
    found: dict[int, int | None] = dict.fromkeys(event.request_id for event in preempted)
    if record.batch is None or before.kv is None:
        return found
    views = before.requests
    victims = deque(event for event in preempted if event.reason in NO_BLOCKS)
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
