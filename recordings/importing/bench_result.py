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
            expected = f"{num} entries ({detail})" if num else f"an entry a request ({detail})"
            raise file.error(f"{line}, {name}", expected, str(len(got) or "none"))
    duration_ns = round(told.duration * _NS)
    starts_s = told.start_times
    if starts_s is None:
        notes.append("it has no start times: requests are spread evenly over its duration")
        # So far apart that the last token comes at the end.
        lasted_s = [ttft + sum(itls) for ttft, itls in zip(told.ttfts, told.itls, strict=True)]
        apart_s = [max(0, told.duration - e2e) / n for n, e2e in enumerate(lasted_s) if n]
        starts_s = [number * min(apart_s, default=0) for number in range(num)]
    requests = [_request(told, number, round(at * _NS)) for number, at in enumerate(starts_s)]
    if len(results) > 1:
        notes.append(f"it holds {len(results)} results: the last one is shown")
    try:
        end_ns = int(time.mktime(time.strptime(told.date, "%Y%m%d-%H%M%S"))) * 10**9
    except (ValueError, OverflowError):
        end_ns = file.changed_ns
    began_ns = end_ns - duration_ns
    note = f"{file.path.name}: {'; '.join(notes)}" if notes else None
    has_starts, model = told.start_times is not None, told.model_id or ""
    return client_session(file, tool, requests, began_ns, note, model, has_starts=has_starts)


def _request(told: _Result, number: int, start_ns: int) -> ClientRequest:
    tokens_ns = [start_ns + round(told.ttfts[number] * _NS)]
    for gap_s in told.itls[number]:  # rounded one by one: each gap is as the tool says
        tokens_ns.append(tokens_ns[-1] + round(gap_s * _NS))
    error = told.errors[number] if number < len(told.errors) else None
    return ClientRequest(
        client_id=f"-{number}",  # so ends the id that vLLM's sends
        start_ns=start_ns,
        end_ns=tokens_ns[-1],
        num_prompt=told.input_lens[number],
        num_output=told.output_lens[number],
        tokens_ns=tokens_ns if told.ttfts[number] else [],
        error=error or (None if told.ttfts[number] else "no token came"),
    )
