"""`QueueWait`: one wait for admission, what blocked it, and how many requests stood behind it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stepscope.engine.protocol.wire import KnobValue, RequestView
from stepscope.recordings.attribution.causes import WORDS, Piece, queue_reason_text

_REASONS: Mapping[str, str] = {
    **{cause: words.queue for cause, words in WORDS.items()},
    "preemption": "a step that preempted",
    "": "unknown",
}


class QueueWait(NamedTuple):
    """A wait for admission. None is unknown.

    Attributes:
        since_ns: when the request arrived or was preempted.
        end_ns: when it was admitted or ended; None if it still waits.
        step: the step that admitted it; None if no step did.
        reasons: for how many ns each reason blocked the queue. "" if it is not known; "step" for
            the rest of the step that was running at its arrival; else a cause of `causes.py`.
        num_behind: requests that waited behind it when its wait ended, or now.
    """

    request_id: int
    was_preempted: bool
    since_ns: int | None
    end_ns: int | None
    step: int | None
    reasons: Mapping[str, int]
    num_behind: int
    client_id: str = ""
    num_prompt_tokens: int = 0

    def waited_ns(self, now_ns: int) -> int | None:
        """How long it waited, or has waited so far. None if its start is unknown."""
        end_ns = now_ns if self.end_ns is None else self.end_ns
        return None if self.since_ns is None else max(0, end_ns - self.since_ns)


def reasons_of(pieces: Iterable[Piece]) -> dict[str, int]:
    """For how many ns each reason blocked the queue, from the pieces of a wait in it."""
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

    Args:
        preempted_ns: request id -> when the request was preempted.
    """
    if knobs.get("policy") == "priority":
        return sorted(views, key=lambda view: (view.priority, view.arrival_ns, view.request_id))

    def place(view: RequestView) -> tuple[bool, int, int, int]:
        out_ns = preempted_ns.get(view.request_id) or 0
        return view.status != "preempted", -out_ns, view.arrival_ns, view.request_id

    return sorted(views, key=place)


def reason_text(reason: str) -> str:
    """What a request waits for, in words."""
    return _REASONS.get(reason) or queue_reason_text(reason).removeprefix("for ")
