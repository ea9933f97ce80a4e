"""The `per_request_lifecycle_metrics.json` of inference-perf: an array, one object a request.

Times are seconds of the client's `perf_counter`; a chunk without text has none. Form: its
`apis/base.py` of 2026; older releases have the fields of `response_metrics` in `info` itself.
"""

from typing import Any

from msgspec import Struct

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Count, ForeignFile, ForeignSession, Number

_NS = 1e9


class _Request(Struct):
    start_time: Number
    end_time: Number
    input_tokens: Count = 0
    output_tokens: Count = 0
    prompt_tokens: Count | None = None  # as the server counts
    completion_tokens: Count | None = None
    chunk_times: list[Number] = []
    output_token_times: list[Number] = []
    error: dict[str, Any] | None = None


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the requests; None if it is another file."""
    documents, requests = file.documents, []
    if not documents or not {"start_time", "end_time", "info"} <= documents[0][1].keys():
        return None
    for number, (line, values) in enumerate(documents, 1):
        place = f"{line}, request {number}"
        info = file.part(place, values, "info")
        answer = file.part(place, info, "response_metrics")
        told = values | info | answer | file.part(place, answer, "server_usage")
        requests.append(_request(file.fields(place, told, _Request)))
    lasted_ns = max(each.end_ns for each in requests) - min(each.start_ns for each in requests)
    return client_session(file, "inference-perf", requests, file.changed_ns - lasted_ns)


def _request(told: _Request) -> ClientRequest:
    times_s = told.chunk_times or told.output_token_times
    return ClientRequest(
        start_ns=round(told.start_time * _NS),
        end_ns=round(told.end_time * _NS),
        num_prompt=told.prompt_tokens or told.input_tokens,
        num_output=told.completion_tokens or told.output_tokens,
        tokens_ns=[round(time_s * _NS) for time_s in times_s],
        error=None if told.error is None else str(told.error.get("error_msg") or told.error),
    )
