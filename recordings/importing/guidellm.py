"""The report of `guidellm benchmark`: a JSON file with the requests of each benchmark.

A request tells when its first and last token came and how many came, not when the others did: so
its gaps are unknown. guidellm calls "inter-token latency" the mean of a request, which is our TPOT.
Form: guidellm 0.8.1, `guidellm/schemas/base/request_stats.py`.
"""

from typing import Any

from msgspec import Struct

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Count, ForeignFile, ForeignSession, Number

_NS = 1e9
_GROUPS = ("successful", "incomplete", "errored")


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


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the last benchmark in the report; None if it is no report."""
    documents, requests = file.documents, []
    if not documents or not {"benchmarks", "config"} <= documents[0][1].keys():
        return None
    line, values = documents[0]
    benchmarks = file.fields(line, values, _Benchmarks).benchmarks
    groups = benchmarks[-1].requests if benchmarks else {}
    for name in _GROUPS:
        for number, each in enumerate(groups.get(name) or ()):
            place = f"{line}, {name}[{number}]"
            info = file.part(place, each, "info")
            told = each | info | file.part(place, info, "timings")
            stats = file.fields(place, told, _RequestStats)
            if name == "successful" or stats.request_start_time is not None:
                error = None if name == "successful" else stats.error or name
                requests.append(_request(stats, error))
    if not requests:
        expected = "a request (guidellm saves them, unless sample_size is 0)"
        raise file.error(f"{line}, benchmarks[-1].requests", expected, "none")
    note = None
    if len(benchmarks) > 1:
        note = f"{file.path.name} holds {len(benchmarks)} benchmarks: the last one is shown"
    began_ns = min(each.start_ns for each in requests)
    return client_session(file, "guidellm", requests, began_ns, note)


def _request(told: _RequestStats, error: str | None) -> ClientRequest:
    start_s = told.request_start_time or 0.0
    ends = dict.fromkeys((told.first_token_iteration, told.last_token_iteration))
    return ClientRequest(
        client_id=told.request_id,
        start_ns=round(start_s * _NS),
        end_ns=round((told.request_end_time or start_s) * _NS),
        num_prompt=told.prompt_tokens or 0,
        num_output=told.output_tokens or 0,
        tokens_ns=[round(token_s * _NS) for token_s in ends if token_s is not None],
        has_gaps=False,
        error=error,
    )
