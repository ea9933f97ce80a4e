"""The result of `vllm bench serve --save-result --save-detailed`, and SGLang's `bench_serving`.

Both tools write the same lists, one entry a request: seconds of the client's `perf_counter`.
SGLang (`--output-details`) and older vLLM do not write when requests began.
"""

import time

from msgspec import Struct

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Count, ForeignFile, ForeignSession, Number

_NS = 1e9


class _Result(Struct):
    total_input_tokens: Count
    input_lens: list[Count] = []
    output_lens: list[Count] = []
    ttfts: list[Number] = []
    itls: list[list[Number]] = []
    start_times: list[Number] | None = None
    errors: list[str | None] = []
    duration: Number = 0.0
    date: str = ""  # of its end
    model_id: str | None = None


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the last result in the file; None if it is no such result."""
    results = [each for each in file.documents if "total_input_tokens" in each[1]]
    if not results:
        return None
    line, values = results[-1]
    told, notes = file.fields(line, values, _Result), []
    tool = "sglang bench_serving" if told.model_id is None else "vllm bench serve"
    num = len(told.input_lens)
    for name in ("input_lens", "output_lens", "ttfts", "itls", "start_times"):
        got = getattr(told, name)
        if got is not None and (len(got) != num or not num):
            detail = "--output-details" if told.model_id is None else "--save-detailed"
            expected = f"{num or 'an'} entries" if num else f"an entry for each request ({detail})"
            raise file.error(f"{line}, {name}", expected, str(len(got) or "none"))
    requests = [_request(told, number) for number in range(num)]
    duration_ns = round(told.duration * _NS)
    if told.start_times is not None:
        starts_ns = [round(start_s * _NS) for start_s in told.start_times]
    else:
        notes.append("it has no start times: requests are spread evenly over its duration")
        # So far apart that the last token comes at the end.
        apart_ns = [max(0, duration_ns - each.end_ns) // n for n, each in enumerate(requests) if n]
        starts_ns = [number * min(apart_ns, default=0) for number in range(num)]
    for each, start_ns in zip(requests, starts_ns, strict=True):
        each.start_ns, each.end_ns = start_ns, each.end_ns + start_ns
        each.tokens_ns = [token_ns + start_ns for token_ns in each.tokens_ns]
    if len(results) > 1:
        notes.append(f"it holds {len(results)} results: the last one is shown")
    try:
        end_s = time.mktime(time.strptime(told.date, "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        end_s = file.changed_s
    began_ns = round(end_s * _NS) - duration_ns
    note = f"{file.path.name}: {'; '.join(notes)}" if notes else None
    return client_session(file, tool, told.model_id or "", requests, began_ns, note)


def _request(told: _Result, number: int) -> ClientRequest:
    """A request that starts at 0."""
    tokens_ns = [round(told.ttfts[number] * _NS)]
    for gap_s in told.itls[number]:  # rounded one by one: each gap is as the tool says
        tokens_ns.append(tokens_ns[-1] + round(gap_s * _NS))
    error = told.errors[number] if number < len(told.errors) else None
    return ClientRequest(
        start_ns=0,
        end_ns=tokens_ns[-1],
        num_prompt=told.input_lens[number],
        num_output=told.output_lens[number],
        tokens_ns=tokens_ns if tokens_ns[0] else [],
        error=error or (None if tokens_ns[0] else "no token came"),
    )
