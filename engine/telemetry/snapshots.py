"""Makes a `Snapshot` of the engine's state, for observers that join later."""

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import (
    Audited,
    ControlCounts,
    EngineInfo,
    EngineState,
    LeasedKnobs,
    PauseSpan,
    RequestView,
    Snapshot,
    Transcript,
)
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.workload.arrivals import describe, fields_of


def request_view(request: Request) -> RequestView:
    """Describe a request as a snapshot contains it."""
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
        origin=request.origin,
        high_water=request.high_water,
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
    workload: WorkloadSpec | None,
    control: ControlCounts | None = None,
    audit: list[Audited] | None = None,
    transcripts: list[Transcript] | None = None,
    pauses: list[PauseSpan] | None = None,
    leased: LeasedKnobs | None = None,
) -> Snapshot:
    """Make a snapshot of the state right after the message `sequence` was published."""
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
        workload=None if workload is None else describe(workload),
        workload_spec=None if workload is None else fields_of(workload),
        control=control,
        audit=audit or None,
        transcripts=transcripts,
        pauses=pauses,
        leased=leased,
    )
