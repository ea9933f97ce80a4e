"""Why a decode waited: the step that made a gap between two tokens, and whose prefill it was."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.wire import BatchRow, Phase, Preempted, StepRecord
from stepscope.recordings.columns import StepColumns
from stepscope.recordings.session import request_name

StallCause: TypeAlias = Literal["prefill", "recompute", "preempted", "idle", "step"]

_DECODE = int(Phase.DECODE)
_RECOMPUTE = int(Phase.RECOMPUTE)


class Stall(NamedTuple):
    """The longest gap between two tokens that ended in `step`."""

    step: int
    itl_ns: int
    request_id: int  # who waited
    cause: StallCause
    cause_step: int  # where the time went
    cause_request_id: int | None  # whose prefill, or None
    num_prefill_tokens: int  # of that request in that step

    @property
    def text(self) -> str:
        name = request_name(self.request_id)
        itl = f"ITL {self.itl_ns / 1e6:.0f} ms"
        if self.cause_request_id is not None:
            who = request_name(self.cause_request_id)
            return (
                f"step {self.cause_step:,} {self.cause} {who} {self.num_prefill_tokens} tok → {itl}"
            )
        why = {
            "preempted": f"{name} preempted",
            "idle": "engine idle or paused before it",
        }.get(self.cause, "slow step")
        return f"step {self.cause_step:,} {why} → {itl}"


def attribute(
    columns: StepColumns, index: int, record: Callable[[int], StepRecord | None]
) -> Stall | None:
    """Explain the longest gap that ended in the step at `index`.

    Of all steps that ran between the request's two tokens, the one with most prefill is named, and
    in it the request with the largest share; without any, preemption, then time between steps.

    Args:
        record: gives the record of a step, None when it is not there any more.
    """
    gap_ns = columns.column("max_itl_ns")[index]
    request_id = columns.column("max_itl_request_id")[index]
    if gap_ns < 0:
        return None
    step = columns.steps[index]
    first = columns.index_at(columns.tokens_ns[index] - gap_ns) + 1
    preempted = columns.column("num_preempted")
    for at in range(first, index + 1):
        if preempted[at] > 0 and _preempts(record(columns.steps[at]), request_id):
            return Stall(step, gap_ns, request_id, "preempted", columns.steps[at], None, 0)
    prefill = columns.column("num_prefill_tokens")
    at = max(range(first, index + 1), key=prefill.__getitem__, default=index)
    if prefill[at] > 0:
        cause_step = columns.steps[at]
        rows = [
            row
            for row in _rows(record(cause_step))
            if row.phase != _DECODE and row.request_id != request_id
        ]
        if rows:
            largest = max(rows, key=lambda row: row.num_tokens)
            return Stall(
                step,
                gap_ns,
                request_id,
                "recompute" if largest.phase == _RECOMPUTE else "prefill",
                cause_step,
                largest.request_id,
                largest.num_tokens,
            )
    starts = columns.column("schedule_start_ns")
    between_ns = sum(
        max(0, starts[at] - columns.tokens_ns[at - 1]) for at in range(max(first, 1), index + 1)
    )
    return Stall(
        step, gap_ns, request_id, "idle" if between_ns > gap_ns / 2 else "step", step, None, 0
    )


def _rows(record: StepRecord | None) -> list[BatchRow]:
    return [] if record is None or record.batch is None else record.batch


def _preempts(record: StepRecord | None, request_id: int) -> bool:
    return record is not None and any(
        isinstance(event, Preempted) and event.request_id == request_id for event in record.events
    )
