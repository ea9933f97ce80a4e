"""The report of `guidellm benchmark`: a JSON file with the requests of each benchmark.

A request tells when its first and last token came and how many came, not when the others did: so
its gaps are unknown. guidellm calls "inter-token latency" the mean of a request, which is our TPOT.
Form: guidellm 0.8, `guidellm/schemas/base/request_stats.py`.
"""

from msgspec import Struct

from stepscope.recordings.importing.client_session import client_session
from stepscope.recordings.importing.source import (
    ClientRequest,
    Count,
    ForeignFile,
    ForeignSession,
    Number,
)

_NS = 1e9


class _Timings(Struct):
    first_token_iteration: Number | None = None
    last_token_iteration: Number | None = None


class _Info(Struct):
    timings: _Timings
    error: str | None = None


class _Request(Struct):
    info: _Info
    request_start_time: Number | None
    request_end_time: Number | None
    request_id: str = ""
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None


class _RequestGroups(Struct):
    successful: list[_Request] = []
    incomplete: list[_Request] = []
    errored: list[_Request] = []


class _Benchmark(Struct):
    requests: _RequestGroups


class _Benchmarks(Struct):
    benchmarks: list[_Benchmark]


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the last benchmark in the report; None if it is no report."""
    documents = file.documents
    if not documents or not {"benchmarks", "config"} <= documents[0][1].keys():
        return None
    line, values = documents[0]
    benchmarks = file.fields(line, values, _Benchmarks).benchmarks
    groups = benchmarks[-1].requests if benchmarks else _RequestGroups()
    requests = [_finished(each) for each in groups.successful]
    for name, group in (("incomplete", groups.incomplete), ("errored", groups.errored)):
        for each in group:
            if each.request_start_time is not None:
                requests.append(_finished(each))
                requests[-1].error = each.info.error or name
    note = None
    if len(benchmarks) > 1:
        note = f"{file.path.name} holds {len(benchmarks)} benchmarks: the last one is shown"
    began_ns = min((each.start_ns for each in requests), default=0)
    return client_session(file, "guidellm", requests, began_ns, note)


def _finished(each: _Request) -> ClientRequest:
    timings, start_s = each.info.timings, each.request_start_time or 0.0
    ends = dict.fromkeys((timings.first_token_iteration, timings.last_token_iteration))
    return ClientRequest(
        client_id=each.request_id,
        start_ns=round(start_s * _NS),
        end_ns=round((each.request_end_time or start_s) * _NS),
        num_prompt=each.prompt_tokens or 0,
        num_output=each.output_tokens or 0,
        tokens_ns=[round(token_s * _NS) for token_s in ends if token_s is not None],
        has_gaps=False,
    )
