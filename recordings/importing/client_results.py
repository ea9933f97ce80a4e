"""Reads the results of load generators: `FORMS` has a function for the files of each.

- `vllm bench serve --save-result --save-detailed` and `sglang.benchmark.serving --output-details`
  write the same lists, one entry a request: seconds of the client's `perf_counter`. SGLang and
  older vLLM do not write when requests began.
- The report of `guidellm benchmark`, 0.8 (`guidellm/schemas/base/request_stats.py`): a request
  tells when its first and last token came, not when the others did. What guidellm calls
  "inter-token latency" is the mean of a request, our TPOT.
- `profile_export.jsonl` of aiperf, a record for each request, with latencies in milliseconds. Its
  "inter-chunk latency" is our ITL, its "inter-token latency" our TPOT.
- `per_request_lifecycle_metrics.json` of inference-perf (`apis/base.py` of 2026), an object for
  each request: seconds of `perf_counter`; a chunk without text has none.

A record of the session stands for a moment in which tokens came to the client;
`EngineInfo.totals_every_s` says that it is not one step of the engine. A request waits until its
first token, then runs.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Annotated, Any

from msgspec import Meta, Struct

from stepscope.engine.protocol import wire
from stepscope.recordings.importing.source import (
    ClientRequest,
    Count,
    ForeignFile,
    ForeignSession,
    Number,
)

_NS = 1e9
_FIRST = int(wire.RowFlag.LAST_CHUNK | wire.RowFlag.FIRST_TOKEN)
_UnixNs = Annotated[int, Meta(ge=0, lt=2**62)]


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of a result; None if the file is none."""
    found = file.documents[0][1].keys() if file.documents else set()
    form = next((form for keys, form in FORMS if keys <= found), None)
    return form and form(file)


def _chunks(start_ns: int, ttft: float, gaps: Iterable[float], unit_ns: float) -> list[int]:
    """When chunks came. Rounded one by one: each gap is as the tool says."""
    return list(accumulate((round(each * unit_ns) for each in (ttft, *gaps)), initial=start_ns))[1:]


class _Lists(Struct):
    total_input_tokens: Count
    input_lens: list[Count] = []
    output_lens: list[Count] = []
    ttfts: list[Number] = []
    itls: list[list[Number]] = []
    start_times: list[Number] | None = None
    errors: list[str | None] = []
    duration: Number = 0.0
    date: str = ""  # of its end
    model_id: str | None = None  # vLLM's alone


def _lists(file: ForeignFile) -> ForeignSession:
    results = [each for each in file.documents if "total_input_tokens" in each[1]]
    line, values = results[-1]
    told, notes = file.fields(line, values, _Lists), []
    tool, detail, num = "vllm bench serve", "--save-detailed", len(told.input_lens)
    if told.model_id is None:
        tool, detail = "sglang bench_serving", "--output-details"
    for name in ("input_lens", "output_lens", "ttfts", "itls", "start_times"):
        got = getattr(told, name)
        if got is not None and (len(got) != num or not num):
            expected = f"{num} entries ({detail})" if num else f"an entry a request ({detail})"
            raise file.error(f"{line}, {name}", expected, str(len(got) or "none"))
    if (starts_s := told.start_times) is None:
        # So far apart that the last token comes at the end.
        lasted_s = [ttft + sum(itls) for ttft, itls in zip(told.ttfts, told.itls, strict=True)]
        apart_s = [max(0, told.duration - e2e_s) / n for n, e2e_s in enumerate(lasted_s) if n]
        starts_s = [number * min(apart_s, default=0) for number in range(num)]
        notes.append("it has no start times: requests are spread evenly over its duration")
    requests = [_of_lists(told, number, round(at * _NS)) for number, at in enumerate(starts_s)]
    if len(results) > 1:
        notes.append(f"it holds {len(results)} results: the last one is shown")
    try:
        end_ns = int(time.mktime(time.strptime(told.date, "%Y%m%d-%H%M%S"))) * 10**9
    except (ValueError, OverflowError):
        end_ns = file.changed_ns
    note = f"{file.path.name}: {'; '.join(notes)}" if notes else None
    wall_ns, has_starts = end_ns - round(told.duration * _NS), told.start_times is not None
    model = told.model_id or ""
    return _session(file, tool, requests, wall_ns, note, model, has_starts=has_starts)


def _of_lists(told: _Lists, number: int, start_ns: int) -> ClientRequest:
    ttft_s = told.ttfts[number]
    tokens_ns = _chunks(start_ns, ttft_s, told.itls[number], _NS)
    error = told.errors[number] if number < len(told.errors) else None
    return ClientRequest(
        client_id=f"-{number}",  # so ends the id that vLLM's sends
        start_ns=start_ns,
        end_ns=tokens_ns[-1],
        num_prompt=told.input_lens[number],
        num_output=told.output_lens[number],
        tokens_ns=tokens_ns if ttft_s else [],
        error=error or (None if ttft_s else "no token came"),
    )


class _Benchmark(Struct):
    requests: dict[str, list[dict[str, Any]] | None] = {}


class _Benchmarks(Struct):
    benchmarks: list[_Benchmark]


class _RequestStats(Struct):
    request_start_time: Number | None
    request_end_time: Number | None
    request_id: str = ""
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    first_token_iteration: Number | None = None
    last_token_iteration: Number | None = None
    error: str | None = None


def _guidellm(file: ForeignFile) -> ForeignSession:
    (line, values), requests = file.documents[0], []
    benchmarks = file.fields(line, values, _Benchmarks).benchmarks
    groups = benchmarks[-1].requests if benchmarks else {}
    for name in ("successful", "incomplete", "errored"):
        for number, each in enumerate(groups.get(name) or ()):
            place = f"{line}, {name}[{number}]"
            info = file.part(place, each, "info")
            timings = file.part(place, info, "timings")
            told = file.fields(place, each | info | timings, _RequestStats)
            if name != "successful" and told.request_start_time is None:
                continue
            start_s = told.request_start_time or 0.0
            ends = dict.fromkeys((told.first_token_iteration, told.last_token_iteration))
            requests.append(
                ClientRequest(
                    client_id=told.request_id,
                    start_ns=round(start_s * _NS),
                    end_ns=round((told.request_end_time or start_s) * _NS),
                    num_prompt=told.prompt_tokens or 0,
                    num_output=told.output_tokens or 0,
                    tokens_ns=[round(token_s * _NS) for token_s in ends if token_s is not None],
                    has_gaps=False,
                    error=None if name == "successful" else told.error or name,
                )
            )
    if not requests:
        expected = "a request (guidellm saves them, unless sample_size is 0)"
        raise file.error(f"{line}, benchmarks[-1].requests", expected, "none")
    note = None
    if len(benchmarks) > 1:
        note = f"{file.path.name} holds {len(benchmarks)} benchmarks: the last one is shown"
    return _session(file, "guidellm", requests, note=note)


class _Record(Struct):
    request_start_ns: _UnixNs
    request_end_ns: _UnixNs
    x_request_id: str = ""
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False
    error: dict[str, Any] | None = None
    input_sequence_length: Count = 0
    output_sequence_length: Count = 0
    time_to_first_token: Number | None = None
    inter_chunk_latency: list[Number] | None = None
    request_latency: Number | None = None


def _aiperf(file: ForeignFile) -> ForeignSession:
    requests = []
    for line, values in file.documents:
        told = file.part(line, values, "metrics")
        metrics = {name: file.part(line, told, name).get("value") for name in told}
        record = file.fields(line, values | file.part(line, values, "metadata") | metrics, _Record)
        if record.benchmark_phase != "profiling":
            continue
        start_ns, ttft_ms = record.request_start_ns, record.time_to_first_token
        gaps_ms, e2e_ms = record.inter_chunk_latency, record.request_latency
        error = None if record.error is None else str(record.error.get("message"))
        requests.append(
            ClientRequest(
                client_id=record.x_request_id,
                start_ns=start_ns,
                end_ns=record.request_end_ns if e2e_ms is None else start_ns + round(e2e_ms * 1e6),
                num_prompt=record.input_sequence_length,
                num_output=record.output_sequence_length,
                tokens_ns=[] if ttft_ms is None else _chunks(start_ns, ttft_ms, gaps_ms or (), 1e6),
                has_gaps=gaps_ms is not None,
                error=error or ("cancelled" if record.was_cancelled else None),
            )
        )
    return _session(file, "aiperf", requests)


class _Lifecycle(Struct):
    start_time: Number
    end_time: Number
    input_tokens: Count = 0
    output_tokens: Count = 0
    prompt_tokens: Count | None = None  # as the server counts
    completion_tokens: Count | None = None
    chunk_times: list[Number] = []
    error: dict[str, Any] | None = None


def _inference_perf(file: ForeignFile) -> ForeignSession:
    requests = []
    for number, (line, values) in enumerate(file.documents, 1):
        place = f"{line}, request {number}"
        info = file.part(place, values, "info")
        answer = file.part(place, info, "response_metrics")
        usage = file.part(place, answer, "server_usage")
        told = file.fields(place, values | info | answer | usage, _Lifecycle)
        error = None if told.error is None else str(told.error.get("error_msg") or told.error)
        requests.append(
            ClientRequest(
                start_ns=round(told.start_time * _NS),
                end_ns=round(told.end_time * _NS),
                num_prompt=told.prompt_tokens or told.input_tokens,
                num_output=told.completion_tokens or told.output_tokens,
                tokens_ns=[round(time_s * _NS) for time_s in told.chunk_times],
                error=error,
            )
        )
    lasted_ns = max(each.end_ns for each in requests) - min(each.start_ns for each in requests)
    return _session(file, "inference-perf", requests, file.changed_ns - lasted_ns)


def _session(
    file: ForeignFile,
    tool: str,
    requests: list[ClientRequest],
    wall_ns: int | None = None,
    note: str | None = None,
    model: str = "",
    *,
    has_starts: bool = True,
) -> ForeignSession:
    """`wall_ns`: Unix time at which the first one starts; None: requests tell Unix times.

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
    # Records are of moments, not of intervals.
    told = {"totals_every_s": 1e-3, "model": _text(model), **clocks}
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


# By what the first object of a file must have.
FORMS = (
    ({"total_input_tokens"}, _lists),
    ({"benchmarks", "config"}, _guidellm),
    ({"metadata", "metrics"}, _aiperf),
    ({"start_time", "end_time", "info"}, _inference_perf),
)
