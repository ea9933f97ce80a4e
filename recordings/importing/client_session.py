"""Makes the session of a load generator's result: what a client saw of its requests.

A record stands for a moment in which tokens came to the client; `EngineInfo.totals_every_s` says
that it is not one step of the engine. A request waits until its first token, then runs.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from stepscope.engine.protocol import wire
from stepscope.recordings.importing.source import ClientRequest, ForeignFile, ForeignSession

_FIRST = int(wire.RowFlag.LAST_CHUNK | wire.RowFlag.FIRST_TOKEN)
_ANY_MOMENT_S = 1e-3  # records are of moments, not of intervals


def client_session(
    file: ForeignFile,
    tool: str,
    requests: list[ClientRequest],
    wall_ns: int | None = None,
    note: str | None = None,
    model: str = "",
    *,
    has_starts: bool = True,
) -> ForeignSession:
    """The session of some requests.

    `wall_ns`: Unix time at which the first one starts; None: requests tell Unix times.

    Raises RecordingError: there is no request, or all of them failed.
    """
    if not requests:
        raise file.error(1, f"the requests of this result of {tool}", "none, or their sums alone")
    errors = [each.error for each in requests if each.error is not None]
    if len(errors) == len(requests):
        got = (errors[-1].strip().splitlines() or ["failures"])[-1][:80]
        raise file.error(1, f"a request that did not fail, of {len(requests):,}", got)
    in_order = sorted(requests, key=lambda each: each.start_ns)
    start_ns = in_order[0].start_ns
    clocks = {"monotonic_ns": start_ns, "wall_ns": start_ns if wall_ns is None else wall_ns}
    told = {"totals_every_s": _ANY_MOMENT_S, "model": _text(model), **clocks}
    info = file.info(tool, "result", **told)
    return ForeignSession(info, _messages(in_order), note, requests, has_starts)


def _messages(requests: list[ClientRequest]) -> Iterator[wire.Telemetry]:
    seen = [part for number, each in enumerate(requests) for part in _seen(number, each)]
    step, last_ns = -1, 0
    waiting: set[int] = set()
    running: set[int] = set()
    for time_ns, group in groupby(sorted(seen, key=itemgetter(0)), itemgetter(0)):
        parts = [part for _, part in group]
        rows = [part for part in parts if isinstance(part, wire.BatchRow)]
        arrived = [part for part in parts if isinstance(part, wire.Arrived)]
        ended = [part for part in parts if isinstance(part, wire.Finished | wire.Aborted)]
        if not waiting and not running:
            last_ns = time_ns
        waiting.update(each.request_id for each in arrived)
        if arrived:
            yield wire.EngineStatus(
                time_ns=time_ns,
                state="running",
                step=step,
                num_running=len(running),
                num_waiting=len(waiting),
                events=[*arrived],
            )
        running.update(row.request_id for row in rows)
        running.difference_update(each.request_id for each in ended)
        waiting.difference_update(each.request_id for each in (*rows, *ended))
        if not rows and not ended:
            continue
        step += 1
        prefill = sum(row.num_tokens for row in rows if row.phase == wire.Phase.PREFILL)
        yield wire.StepRecord(
            step=step,
            schedule_start_ns=last_ns,
            tokens_ns=time_ns,
            num_prefill_tokens=prefill,
            num_decode_tokens=sum(row.num_tokens for row in rows) - prefill,
            batch=rows,
            num_running=len(running),
            num_waiting=len(waiting),
            events=[*ended],
        )
        last_ns = time_ns


def _seen(
    number: int, each: ClientRequest
) -> Iterator[tuple[int, wire.RequestEvent | wire.BatchRow]]:
    prompt, chunks, start_ns = each.num_prompt, each.tokens_ns, each.start_ns
    end_ns = max(start_ns, each.end_ns, *chunks)
    most = max(1, each.num_output)
    yield start_ns, wire.Arrived(number, "client", prompt, most, 0, start_ns)
    if chunks:
        yield chunks[0], wire.BatchRow(number, wire.Phase.PREFILL, 0, prompt, 0, 0, _FIRST)
    elif each.error is None:
        # A row that does not go on from the one before tells its tokens, and no latency.
        yield end_ns, wire.BatchRow(number, wire.Phase.PREFILL, 0, prompt, 0, 0, 0)
        yield end_ns, wire.BatchRow(number, wire.Phase.DECODE, prompt, each.num_output, 0, 0, 0)
    # The first chunk counts as one token; the others share the rest.
    done = 0
    for place, time_ns in enumerate(chunks[1:], 1):
        upto = (most - 1) * place // (len(chunks) - 1)
        start = prompt + done + (not each.has_gaps)
        yield time_ns, wire.BatchRow(number, wire.Phase.DECODE, start, upto - done, 0, 0, 0)
        done = upto
    if each.error is None:
        yield end_ns, wire.Finished(number, "", each.num_output)
    else:
        yield end_ns, wire.Aborted(number, _text(each.error.strip()[:80]))


def _text(told: str) -> str:
    return told.encode(errors="replace").decode()  # escapes in JSON may be no text
