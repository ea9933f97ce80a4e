"""The result of `vllm bench serve --save-result --save-detailed`, and SGLang's `bench_serving`.

Both tools write the same lists, one entry a request: seconds of the client's `perf_counter`.
SGLang (`--output-details`) and older vLLM do not write when requests began.
"""

import time
from typing import Any

from stepscope.recordings.importing.client_session import ClientRequest, client_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")
_NS = 1e9


def read(file: ForeignFile) -> ForeignSession | None:
    """The session of the last result in the file; None if it is no such result."""
    results = [each for each in file.documents if "total_input_tokens" in each[1]]
    if not results:
        return None
    line, values = results[-1]
    told = Fields(file, line, values)
    tool = "vllm bench serve" if "model_id" in values else "sglang bench_serving"
    lists = [told.list(name) for name in _LISTS]
    if None in lists:
        detail = "--save-detailed" if "model_id" in values else "--output-details"
        missing = _LISTS[lists.index(None)]
        raise told.error(missing, f"a list with an entry for each request ({detail})", None)
    for name, each in zip(_LISTS, lists, strict=True):
        if len(each or ()) != len(lists[0] or ()):
            raise told.error(name, f"{len(lists[0] or ()):,} entries", f"{len(each or ()):,}")
    requests = list(_requests(told, lists, told.list("errors")))
    starts, notes = told.list("start_times"), []
    if starts is not None and len(starts) != len(requests):
        raise told.error("start_times", f"{len(requests):,} entries", f"{len(starts):,}")
    duration_ns = round((told.number("duration") or 0.0) * _NS)
    # So far apart that the last token comes at the end.
    apart_ns = [max(0, duration_ns - each.end_ns) // n for n, each in enumerate(requests) if n]
    for number, each in enumerate(requests):
        if starts is not None:
            shift_ns = round(told.as_number(f"start_times[{number}]", starts[number]) * _NS)
        else:
            shift_ns = number * min(apart_ns, default=0)
        each.start_ns += shift_ns
        each.end_ns += shift_ns
        each.tokens_ns = [token_ns + shift_ns for token_ns in each.tokens_ns]
    if starts is None and requests:
        notes.append("it has no start times: requests are spread evenly over its duration")
    if len(results) > 1:
        notes.append(f"it holds {len(results)} results: the last one is shown")
    model = told.text("model_id")
    note = f"{file.name}: {'; '.join(notes)}" if notes else None
    return client_session(file, tool, model, requests, _began_ns(told, duration_ns), note)


def _requests(
    told: Fields, lists: list[list[Any] | None], errors: list[Any] | None
) -> list[ClientRequest]:
    """The requests, all with a start at 0."""
    found = []
    for number, (prompt, output, ttft, itls) in enumerate(zip(*map(_list, lists), strict=True)):
        ttft_ns = round(told.as_number(f"ttfts[{number}]", ttft) * _NS)
        if not isinstance(itls, list):
            raise told.error(f"itls[{number}]", "a list", itls)
        # The sum of rounded gaps: each gap is as the tool says, to the nanosecond.
        tokens_ns = [ttft_ns]
        for gap in itls:
            tokens_ns.append(tokens_ns[-1] + round(told.as_number(f"itls[{number}]", gap) * _NS))
        error = errors[number] if errors is not None and number < len(errors) else ""
        num_output = round(told.as_number(f"output_lens[{number}]", output))
        has_failed = bool(error) or not ttft_ns
        found.append(
            ClientRequest(
                start_ns=0,
                end_ns=tokens_ns[-1],
                num_prompt=round(told.as_number(f"input_lens[{number}]", prompt)),
                num_output=num_output,
                tokens_ns=tokens_ns if ttft_ns else [],
                error=(str(error) or "no token came") if has_failed else None,
            )
        )
    return found


def _list(values: list[Any] | None) -> list[Any]:
    return values or []


def _began_ns(told: Fields, duration_ns: int) -> int:
    """When the benchmark began, Unix time: its `date` is that of its end."""
    try:
        end_s = time.mktime(time.strptime(told.text("date"), "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        end_s = told.file.changed_s
    return round(end_s * _NS) - duration_ns
