"""From the engine's state to what is told of it: step records, snapshots, signs of life."""

from typing import cast

import msgspec

from stepscope.engine.batch_rows import BatchRows
from stepscope.engine.config import Knobs
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.step import StepResult
from stepscope.engine.step_books import StepBooks
from stepscope.engine.wire import (
    Audited,
    BatchRow,
    ControlCounts,
    EngineInfo,
    EngineState,
    PauseSpan,
    RequestEvent,
    RequestView,
    Snapshot,
    StepRecord,
    Transcript,
)


def step_record(
    *,
    step: int,
    schedule_ns: tuple[int, int],
    result: StepResult,
    batch: BatchRows,
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
        batch: taken before `update`.
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
        batch=cast("list[BatchRow]", msgspec.Raw(batch.payload)),  # what the encoder takes as it is
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
    pauses: list[PauseSpan] | None = None,
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
        pauses=pauses,
    )
