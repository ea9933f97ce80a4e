"""Makes the session of a load generator's result: what a client saw of its requests.

A record stands for a moment in which tokens came to the client; `EngineInfo.totals_every_s` says
that it is not one step of the engine. A request waits until its first token, then runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import (
    Aborted,
    Arrived,
    BatchRow,
    EngineInfo,
    EngineStatus,
    Finished,
    Phase,
    RequestEvent,
    RowFlag,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.importing.source import ForeignFile, ForeignSession

_FIRST = int(RowFlag.LAST_CHUNK | RowFlag.FIRST_TOKEN)
_ANY_MOMENT_S = 1e-3  # records are of moments, not of intervals


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """One request. Times are nanoseconds of one clock.

    Attributes:
        tokens_ns: when its chunks came; empty if the file does not tell.
        has_gaps: whether those are all its chunks, so that times in between are gaps.
        error: why it failed; None: it finished.
    """

    start_ns: int
    end_ns: int
    num_prompt: int
    num_output: int
    tokens_ns: list[int] = field(default_factory=list)
    has_gaps: bool = True
    error: str | None = None


def client_session(
    file: ForeignFile,
    tool: str,
    model: str,
    requests: list[ClientRequest],
    wall_ns: int,
    note: str | None = None,
) -> ForeignSession:
    """The session of some requests; `wall_ns`: Unix time at which the first one starts.

    Raises:
        RecordingError: there is no request, or all of them failed.
    """
    if not requests:
        raise file.error(1, f"the requests of this result of {tool}", "none, or their sums alone")
    errors = [each.error for each in requests if each.error is not None]
    if len(errors) == len(requests):
        got = (errors[-1].strip().splitlines() or ["failures"])[-1][:80]
        raise file.error(1, f"a request that did not fail, of {len(requests):,}", got)
    requests = sorted(requests, key=lambda each: each.start_ns)
    info = EngineInfo(
        engine_id=file.path.name,
        name=file.path.name,
        software_version="",
        model=model,
        engine=tool,
        imported=f"a result of {tool}",
        monotonic_ns=requests[0].start_ns,
        wall_ns=wall_ns,
        totals_every_s=_ANY_MOMENT_S,
    )
    return ForeignSession(info, _messages(requests), note)


@dataclass(slots=True)
class _Moment:
    """What the client saw at one time."""

    arrived: list[RequestEvent] = field(default_factory=list)
    rows: list[BatchRow] = field(default_factory=list)
    ended: list[RequestEvent] = field(default_factory=list)
    num_prefill: int = 0
    num_decode: int = 0
    num_begun: int = 0  # requests that stop waiting


def _messages(requests: list[ClientRequest]) -> Iterator[Telemetry]:
    moments: dict[int, _Moment] = {}
    for number, each in enumerate(requests):
        _add(moments, number, each)
    step, last_ns, num_waiting, num_running = -1, 0, 0, 0
    for time_ns, moment in sorted(moments.items()):
        if num_running == num_waiting == 0:
            last_ns = time_ns
        num_waiting += len(moment.arrived)
        if moment.arrived:
            yield EngineStatus(
                time_ns=time_ns,
                state="running",
                step=step,
                num_running=num_running,
                num_waiting=num_waiting,
                events=moment.arrived,
            )
        num_waiting -= moment.num_begun
        num_running += moment.num_begun - len(moment.ended)
        if not moment.rows and not moment.ended:
            continue
        step += 1
        yield StepRecord(
            step=step,
            schedule_start_ns=last_ns,
            tokens_ns=time_ns,
            num_prefill_tokens=moment.num_prefill,
            num_decode_tokens=moment.num_decode,
            batch=moment.rows,
            num_running=num_running,
            num_waiting=num_waiting,
            events=moment.ended,
        )
        last_ns = time_ns


def _add(moments: dict[int, _Moment], number: int, each: ClientRequest) -> None:
    def at(time_ns: int) -> _Moment:
        return moments.setdefault(max(each.start_ns, time_ns), _Moment())

    prompt, chunks = each.num_prompt, each.tokens_ns
    at(each.start_ns).arrived.append(
        Arrived(number, "client", prompt, max(1, each.num_output), 0, each.start_ns)
    )
    begun = at(chunks[0] if chunks else each.end_ns)
    begun.num_begun += 1
    if chunks:
        begun.rows.append(BatchRow(number, Phase.PREFILL, 0, prompt, 0, 0, _FIRST))
        begun.num_prefill += prompt
    elif each.error is None:
        # A row that does not go on from the one before tells its tokens, and no latency.
        begun.rows.append(BatchRow(number, Phase.DECODE, prompt, each.num_output, 0, 0, 0))
        begun.num_prefill += prompt
        begun.num_decode += each.num_output
    # The first chunk counts as one token; the others share the rest.
    num_rest, done = max(0, each.num_output - 1), 0
    for place, time_ns in enumerate(chunks[1:], 1):
        upto = num_rest * place // (len(chunks) - 1)
        start = prompt + done + (not each.has_gaps)
        moment = at(time_ns)
        moment.rows.append(BatchRow(number, Phase.DECODE, start, upto - done, 0, 0, 0))
        moment.num_decode += upto - done
        done = upto
    at(each.end_ns).ended.append(
        Finished(number, "", each.num_output)
        if each.error is None
        else Aborted(number, each.error.strip()[:80])
    )
