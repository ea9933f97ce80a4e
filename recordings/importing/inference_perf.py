"""The `per_request_lifecycle_metrics.json` of inference-perf: an array, one object a request.

Times are seconds of the client's `perf_counter`; a chunk without text has none. Form: its
`apis/base.py` of 2026; older releases have the fields of `response_metrics` in `info` itself.
"""

from typing import Any

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
_KEYS = {"start_time", "end_time", "request", "info"}


class _Usage(Struct):
    completion_tokens: Count | None = None
    prompt_tokens: Count | None = None


class _Answer(Struct):
    output_tokens: Count = 0
    server_usage: _Usage | None = None
    chunk_times: list[Number] = []
    output_token_times: list[Number] = []


class _Info(_Answer):
    input_tokens: Count = 0
    response_metrics: _Answer | None = None


class _Request(Struct):
    start_time: Number
    end_time: Number
    info: _Info | None = None
    error: dict[str, Any] | None = None


class _Requests(Struct):
    requests: list[_Request]


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the requests; None if it is another file."""
    documents = file.documents
    if not documents or not documents[0][1].keys() >= _KEYS:
        return None
    values = {"requests": [each for _, each in documents]}
    requests = [_request(each) for each in file.fields(1, values, _Requests).requests]
    lasted_ns = max(each.end_ns for each in requests) - min(each.start_ns for each in requests)
    return client_session(file, "inference-perf", requests, file.changed_ns - lasted_ns)


def _request(told: _Request) -> ClientRequest:
    info = told.info or _Info()
    answer = info.response_metrics or info
    usage = answer.server_usage or _Usage()
    error = None if told.error is None else str(told.error.get("error_msg") or told.error)
    times_s = answer.chunk_times or answer.output_token_times
    return ClientRequest(
        start_ns=round(told.start_time * _NS),
        end_ns=round(told.end_time * _NS),
        num_prompt=usage.prompt_tokens or info.input_tokens,
        num_output=usage.completion_tokens or answer.output_tokens,
        tokens_ns=[round(time_s * _NS) for time_s in times_s],
        error=error,
    )
