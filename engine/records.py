"""From the engine's state to what is told of it: step records, snapshots, signs of life."""

from operator import itemgetter
from typing import cast

from stepscope.engine.config import Knobs
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.step import ScheduledRow, StepResult
from stepscope.engine.step_books import StepBooks
from stepscope.engine.wire import (
    Audited,
    BatchRow,
    ControlCounts,
    EngineInfo,
    EngineState,
    Phase,
    RequestEvent,
    RequestView,
    RowFlag,
    Snapshot,
    StepRecord,
    Transcript,
)

_LAST_CHUNK = int(RowFlag.LAST_CHUNK)
_FIRST_TOKEN = int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)
_DECODE = int(Phase.DECODE)
_REQUEST = itemgetter(0)  # of a `ScheduledRow`


def batch_rows(rows: list[ScheduledRow], scheduler: Scheduler) -> list[BatchRow]:
    """The batch as observers see it.

    To be called between `schedule` and `update`: after it, finished requests hold no blocks and
    a first token cannot be told from a later one. The rows are for encoding: plain tuples, which
    take half the time to make and read as `BatchRow` on the other side of the wire.
    """
    if not scheduler.num_prefill_tokens and not scheduler.resumed_now:
        # Most steps; a decode begins where its request has been computed to.
        batch = [
            (r.request_id, _DECODE, r.num_computed_tokens, 1, 0, len(r.block_table), _LAST_CHUNK)
            for r in map(_REQUEST, rows)
        ]
        return cast("list[BatchRow]", batch)
    # A resumed request may have only its newest token to compute, which is no ordinary decode.
    ordinary = None if scheduler.resumed_now else Phase.DECODE
    batch = [
        (r.request_id, _DECODE, r.num_computed_tokens, 1, 0, len(r.block_table), _LAST_CHUNK)
        if row[1] is ordinary
        else _any_row(*row, scheduler)
        for row, r in zip(rows, map(_REQUEST, rows), strict=True)
    ]
    return cast("list[BatchRow]", batch)


def _any_row(
    request: Request, phase: Phase, start: int, num_tokens: int, samples: bool, scheduler: Scheduler
) -> tuple[int, int, int, int, int, int, int]:
    request_id = request.request_id
    flags = 0
    if samples:
        flags = _LAST_CHUNK
        # A first token that is still to come is another step's.
        if request.num_tokens + request.num_pending_tokens == request.num_prompt_tokens:
            flags |= _FIRST_TOKEN
    if request_id in scheduler.resumed_now:
        flags |= _RESUMED
    num_cached_tokens = scheduler.admitted_now.get(request_id, 0)
    num_blocks = len(request.block_table)
    return request_id, int(phase), start, num_tokens, num_cached_tokens, num_blocks, flags


def step_record(
    *,
    step: int,
    schedule_ns: tuple[int, int],
    result: StepResult,
    batch: list[BatchRow],
    books: StepBooks,
    knobs_version: int,
    events: list[RequestEvent],
    num_dropped: int,
    token_ids: list[int | None] | None = None,
    texts: list[str | None] | None = None,
    not_before_ns: int = 0,
    hidden_ns: int | None = None,
    num_wasted_tokens: int | None = None,
) -> StepRecord:
    """The record of a step, built after `update`.

    Args:
        schedule_ns: when scheduling began and ended.
        batch: from `batch_rows`, taken before `update`.
        events: of this step and of the time since the step before.
        books: settled; `StepBooks.of` makes them of a scheduler after `update`.
        token_ids, texts: of each row, only where they are to be told (`TokenTeller`).
        not_before_ns: when the step before it ended, in whose time this one was prepared.
    """
    kv, moves, knobs = books.kv, books.moves, books.knobs
    assert moves is not None, "books are settled before they are told of"
    return StepRecord(
        step=step,
        schedule_start_ns=max(schedule_ns[0], not_before_ns),
        schedule_end_ns=max(schedule_ns[1], not_before_ns),
        launch_ns=max(result.launch_ns, not_before_ns),
        tokens_ns=result.tokens_ns,
        device_ns=result.device_ns,
        knobs_version=knobs_version,
        token_budget=knobs.max_num_batched_tokens,
        max_num_seqs=knobs.max_num_seqs,
        num_prefill_tokens=books.num_prefill_tokens,
        num_decode_tokens=books.num_decode_tokens,
        num_padded_tokens=books.num_padded_tokens + result.num_padded_tokens,
        batch=batch,
        kv=kv,
        moves=moves,
        num_running=books.num_running,
        num_waiting=books.num_waiting,
        waiting_reasons=books.waiting_reasons,
        events=events,
        num_dropped=num_dropped,
        token_ids=token_ids,
        texts=texts,
        hidden_ns=hidden_ns,
        num_wasted_tokens=num_wasted_tokens,
        token_limit=books.token_limit,
    )


def request_view(request: Request) -> RequestView:
    """A request as a late joiner gets to know it."""
    return RequestView(
        request_id=request.request_id,
        client_id=request.client_id,
        status=request.status.value,
        arrival_ns=request.arrival_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
        num_preemptions=request.num_preemptions,
        first_token_ns=request.first_token_ns,
        last_token_ns=request.last_token_ns,
    )


def snapshot(
    *,
    sequence: int,
    step: int,
    time_ns: int,
    info: EngineInfo,
    knobs: Knobs,
    knobs_version: int,
    state: EngineState,
    scheduler: Scheduler,
    num_dropped: int,
    workload: str | None,
    control: ControlCounts | None = None,
    audit: list[Audited] | None = None,
    transcripts: list[Transcript] | None = None,
) -> Snapshot:
    """Everything at once, true right after the message `sequence` was published."""
    return Snapshot(
        sequence=sequence,
        step=step,
        time_ns=time_ns,
        info=info,
        knobs=knobs.as_dict(),
        knobs_version=knobs_version,
        state=state,
        requests=[request_view(request) for request in scheduler.requests.values()],
        blocks=scheduler.kv.runs(),
        kv=scheduler.kv.counts(),
        num_dropped=num_dropped,
        workload=workload,
        control=control,
        audit=audit or None,
        transcripts=transcripts,
    )
