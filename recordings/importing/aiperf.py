"""The records of aiperf, `profile_export.jsonl`: a JSON object for each request.

Its "inter-chunk latency" is our ITL, its "inter-token latency" our TPOT. Form: the records
in aiperf's documentation.
"""

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "sec": 1e9, "s": 1e9}
_MOST_NS = 2**62


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of all requests that were measured; None if the file holds no such records."""
    records = file.documents
    if not records or not {"metadata", "metrics"} <= records[0][1].keys():
        return None
    found = []
    for line, values in records:
        told = Fields(file, line, values)
        metadata = told.part("metadata")
        if metadata.text("benchmark_phase") in ("", "profiling"):
            found.append(_request(told, metadata, told.part("metrics")))
    began_ns = min((each.start_ns for each in found), default=0)
    return client_session(file, "aiperf", "", found, began_ns)


def _request(told: Fields, metadata: Fields, metrics: Fields) -> ClientRequest:
    begin_ns, tokens_ns = _unix_ns(metadata, "request_start_ns"), []
    if (ttft := metrics.values.get("time_to_first_token")) is not None:
        tokens_ns.append(begin_ns + _ns(metrics.part("time_to_first_token"), ttft)[0])
        for gap_ns in _ns(metrics.part("inter_chunk_latency"), []):
            tokens_ns.append(tokens_ns[-1] + gap_ns)
    latency = metrics.part("request_latency")
    error = told.part("error")
    has_failed = bool(error.values) or metadata.values.get("was_cancelled") is True
    prompt = metrics.part("input_sequence_length" if not has_failed else "error_isl")
    return ClientRequest(
        start_ns=begin_ns,
        end_ns=begin_ns + _ns(latency, 0)[0]
        if latency.values
        else _unix_ns(metadata, "request_end_ns"),
        num_prompt=prompt.count("value") or 0,
        num_output=metrics.part("output_sequence_length").count("value") or 0,
        tokens_ns=tokens_ns,
        has_gaps="inter_chunk_latency" in metrics.values,
        error=(error.text("message") or "cancelled") if has_failed else None,
    )


def _unix_ns(metadata: Fields, name: str) -> int:
    """A time in nanoseconds since 1970, which a float cannot hold."""
    value = metadata.values.get(name)
    if not isinstance(value, int) or not 0 <= value <= _MOST_NS:
        raise metadata.error(name, "nanoseconds since 1970", value)
    return value


def _ns(metric: Fields, default: object) -> list[int]:
    """The values of a metric in nanoseconds."""
    values = metric.values.get("value", default)
    unit = _UNITS_NS.get(metric.text("unit") or "ms")
    if unit is None:
        raise metric.error("unit", f"one of {', '.join(_UNITS_NS)}", metric.text("unit"))
    each = values if isinstance(values, list) else [values]
    return [round(metric.as_number("value", value) * unit) for value in each]
