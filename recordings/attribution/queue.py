"""`QueueWait`: one wait for admission, what blocked it, and how many requests stood behind it.

`Preemption`: what a request lost, to which request, and the cost to recompute it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stepscope.engine.protocol.wire import KnobValue, Preempted, RequestView, StepRecord
from stepscope.recordings.attribution.causes import WORDS, Piece, queue_reason_text
from stepscope.recordings.state.session import SessionState

_REASONS: Mapping[str, str] = {
    **{cause: words.queue for cause, words in WORDS.items()},
    "preemption": "a step that preempted",
    "": "unknown",
}


class QueueWait(NamedTuple):
    """A wait for admission. None is unknown.

    `reasons`: for how many ns each reason blocked the queue. "" if it is not known; "step" for the
    rest of the step that was running at its arrival; else a cause of `causes.py`.
    """

    request_id: int
    was_preempted: bool
    since_ns: int | None  # when the request arrived or was preempted
    end_ns: int | None  # when it was admitted or ended; None if it still waits
    step: int | None  # the step that admitted it; None if no step did
    reasons: Mapping[str, int]
    num_behind: int  # requests that waited behind it when its wait ended, or now
    client_id: str = ""
    num_prompt_tokens: int = 0

    def waited_ns(self, now_ns: int) -> int | None:
        """How long it waited, or has waited so far. None if its start is unknown."""
        end_ns = now_ns if self.end_ns is None else self.end_ns
        return None if self.since_ns is None else max(0, end_ns - self.since_ns)


def reasons_of(pieces: Iterable[Piece]) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in pieces:
        reason: str = piece.cause
        if reason in ("queued", "preempted"):
            reason = piece.detail
        elif reason == "unknown":
            reason = ""
        found[reason] = found.get(reason, 0) + piece.ns
    return found


def in_order(
    views: Iterable[RequestView],
    preempted_ns: Mapping[int, int | None],
    knobs: Mapping[str, KnobValue],
) -> list[RequestView]:
    """Waiting requests in the order in which they will be served.

    First come, first served, except that preempted requests come before all others, the latest
    preempted first. With the knob `policy` at "priority", the order is by priority instead.
    """
    if knobs.get("policy") == "priority":
        return sorted(views, key=lambda view: (view.priority, view.arrival_ns, view.request_id))

    def place(view: RequestView) -> tuple[bool, int, int, int]:
        out_ns = preempted_ns.get(view.request_id) or 0
        return view.status != "preempted", -out_ns, view.arrival_ns, view.request_id

    return sorted(views, key=place)


def reason_text(reason: str) -> str:
    return _REASONS.get(reason) or queue_reason_text(reason).removeprefix("for ")


NO_BLOCKS = frozenset({"kv_full", "out of KV blocks"})  # our reason, and vLLM's


@dataclass(slots=True)
class Preemption:
    """One preemption. None is unknown.

    Attributes:
        beneficiary: the request that needed its blocks, which may be the preempted request itself;
            None also if no request needed them.
        recompute_ns: time spent on recomputing; the time of a step is divided equally among its
            tokens.
    """

    request_id: int
    client_id: str
    step: int | None = None  # None if it happened before the first message
    time_ns: int | None = None
    reason: str = ""
    num_blocks: int | None = None
    beneficiary: int | None = None
    num_lost: int | None = None  # tokens in its KV cache before the preemption
    num_from_cache: int = 0  # lost tokens that the prefix cache still had at the next admission
    num_recomputed: int = 0  # lost tokens that were recomputed so far
    recompute_ns: float = 0.0


def lost_between(preemptions: list[Preemption], start: int, end: int) -> list[int]:
    """How many of the positions [start, end) each of a request's preemptions lost, oldest first.

    A position that was lost twice counts for the later one.
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

    Rows are in the order of scheduling, so a preempted request is charged to the first row that
    needs more blocks than are free by then; without such a row, to itself. None for other reasons
    of preemption, and if the engine does not publish batches or KV counts.
    """
    preempted = [event for event in record.events if isinstance(event, Preempted)]
    found: dict[int, int | None] = dict.fromkeys(event.request_id for event in preempted)
    if not preempted or record.batch is None or before.kv is None:
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
