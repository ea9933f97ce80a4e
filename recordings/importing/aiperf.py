"""The records of aiperf, `profile_export.jsonl`: a JSON object for each request.

Its "inter-chunk latency" is our ITL, its "inter-token latency" our TPOT. Form: the records in
aiperf's documentation, with latencies in milliseconds.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Count, ForeignFile, ForeignSession, Number

_UnixNs = Annotated[int, Meta(ge=0, lt=2**62)]


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


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of all requests that were measured; None if the file holds no such records."""
    documents, requests = file.documents, []
    if not documents or not {"metadata", "metrics"} <= documents[0][1].keys():
        return None
    for line, values in documents:
        told = file.part(line, values, "metrics")
        metrics = {name: file.part(line, told, name).get("value") for name in told}
        record = file.fields(line, values | file.part(line, values, "metadata") | metrics, _Record)
        if record.benchmark_phase == "profiling":
            requests.append(_request(record))
    began_ns = min((each.start_ns for each in requests), default=0)
    return client_session(file, "aiperf", requests, began_ns)


def _request(told: _Record) -> ClientRequest:
    start_ns, end_ns, tokens_ns = told.request_start_ns, told.request_end_ns, []
    if told.request_latency is not None:
        end_ns = start_ns + round(told.request_latency * 1e6)
    if told.time_to_first_token is not None:
        tokens_ns = [start_ns + round(told.time_to_first_token * 1e6)]
        for gap_ms in told.inter_chunk_latency or ():
            tokens_ns.append(tokens_ns[-1] + round(gap_ms * 1e6))
    error = None if told.error is None else str(told.error.get("message"))
    return ClientRequest(
        client_id=told.x_request_id,
        start_ns=start_ns,
        end_ns=end_ns,
        num_prompt=told.input_sequence_length,
        num_output=told.output_sequence_length,
        tokens_ns=tokens_ns,
        has_gaps=told.inter_chunk_latency is not None,
        error=error or ("cancelled" if told.was_cancelled else None),
    )
