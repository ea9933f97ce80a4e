"""The report of `guidellm benchmark`: a JSON file with the requests of each benchmark.

A request tells when its first and last token came and how many came, not when the others did: so
its gaps are unknown. guidellm calls "inter-token latency" the mean of a request, which is our TPOT.
Form: guidellm 0.8, `guidellm/schemas/base/request_stats.py`.
"""

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_NS = 1e9
_GROUPS = ("successful", "incomplete", "errored")


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the last benchmark in the report; None if it is no report."""
    documents = file.documents
    if not documents or "benchmarks" not in documents[0][1]:
        return None
    report = Fields(file, *documents[0])
    benchmarks = report.list("benchmarks") or []
    if not benchmarks or not isinstance(benchmarks[-1], dict) or "requests" not in benchmarks[-1]:
        return None
    place = f"benchmarks[{len(benchmarks) - 1}]."
    last = Fields(file, report.line, benchmarks[-1], place)
    requests = [
        request
        for group in _GROUPS
        for number, each in enumerate(last.part("requests").list(group) or [])
        if (request := _request(last, f"requests.{group}[{number}].", each, group)) is not None
    ]
    if not requests:
        raise last.error("requests", "requests (the report holds their sums alone)", None)
    note = None
    if len(benchmarks) > 1:
        note = f"{file.name} holds {len(benchmarks)} benchmarks: the last one is shown"
    model = report.part("config").part("spec").part("backend").text("model")
    began_ns = min(each.start_ns for each in requests)
    return client_session(file, "guidellm", model, requests, began_ns, note)


def _request(last: Fields, place: str, values: object, group: str) -> ClientRequest | None:
    """A request; None if it never began."""
    if not isinstance(values, dict):
        raise last.error(place[:-1], "an object", values)
    told = Fields(last.file, last.line, values, place)
    info = told.part("info")
    timings = info.part("timings")
    start_s = told.number("request_start_time") or timings.number("request_start")
    end_s = told.number("request_end_time") or timings.number("request_end")
    if start_s is None or end_s is None:
        return None
    ends = (timings.number("first_token_iteration"), timings.number("last_token_iteration"))
    tokens_ns = [round(each * _NS) for each in dict.fromkeys(ends) if each is not None]
    error = None
    if group != "successful":
        error = info.text("error") or group
    return ClientRequest(
        start_ns=round(start_s * _NS),
        end_ns=round(end_s * _NS),
        num_prompt=told.count("prompt_tokens") or 0,
        num_output=told.count("output_tokens") or 0,
        tokens_ns=tokens_ns,
        has_gaps=False,
        error=error,
    )
