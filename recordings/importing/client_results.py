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
"""

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from stepscope.recordings.importing.client_session import client_session
from stepscope.recordings.importing.source import (
    ClientRequest,
    Count,
    ForeignFile,
    ForeignSession,
    Number,
)

_NS = 1e9
_Documents: TypeAlias = list[tuple[int, dict[str, Any]]]
_UnixNs = Annotated[int, Meta(ge=0, lt=2**62)]


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of a result; None if the file is none."""
    if not file.documents:
        return None
    found = file.documents[0][1].keys()
    form = next((form for keys, form in FORMS if keys <= found), None)
    return form and form(file, file.documents)


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


def _lists(file: ForeignFile, documents: _Documents) -> ForeignSession:
    results = [each for each in documents if "total_input_tokens" in each[1]]
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
    return client_session(file, tool, requests, wall_ns, note, model, has_starts=has_starts)


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


def _guidellm(file: ForeignFile, documents: _Documents) -> ForeignSession:
    (line, values), requests = documents[0], []
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
    return client_session(file, "guidellm", requests, note=note)


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


def _aiperf(file: ForeignFile, documents: _Documents) -> ForeignSession:
    requests = []
    for line, values in documents:
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
    return client_session(file, "aiperf", requests)


class _Lifecycle(Struct):
    start_time: Number
    end_time: Number
    input_tokens: Count = 0
    output_tokens: Count = 0
    prompt_tokens: Count | None = None  # as the server counts
    completion_tokens: Count | None = None
    chunk_times: list[Number] = []
    error: dict[str, Any] | None = None


def _inference_perf(file: ForeignFile, documents: _Documents) -> ForeignSession:
    requests = []
    for number, (line, values) in enumerate(documents, 1):
        place = f"{line}, request {number}"
        info = file.part(place, values, "info")
        answer = file.part(place, info, "response_metrics")
        usage = file.part(place, answer, "server_usage")
        told = file.fields(place, values | info | answer | usage, _Lifecycle)
        error = None if told.error is None else str(told.error.get("error_msg") or told.error)
        request = ClientRequest(
            start_ns=round(told.start_time * _NS),
            end_ns=round(told.end_time * _NS),
            num_prompt=told.prompt_tokens or told.input_tokens,
            num_output=told.completion_tokens or told.output_tokens,
            tokens_ns=[round(time_s * _NS) for time_s in told.chunk_times],
            error=error,
        )
        requests.append(request)
    lasted_ns = max(each.end_ns for each in requests) - min(each.start_ns for each in requests)
    return client_session(file, "inference-perf", requests, file.changed_ns - lasted_ns)


# By what the first object of a file must have.
FORMS = (
    ({"total_input_tokens"}, _lists),
    ({"benchmarks", "config"}, _guidellm),
    ({"metadata", "metrics"}, _aiperf),
    ({"start_time", "end_time", "info"}, _inference_perf),
)
