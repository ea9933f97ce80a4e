"""The log of a TensorRT-LLM server: a line for each iteration, in the words of both its backends.

Form of the lines: TensorRT-LLM 1.x, `tensorrt_llm/_torch/pyexecutor/py_executor.py` (printed
with `print_iter_log`), and the JSON of the C++ backend's statistics.
"""

import json
import re

from stepscope.recordings.importing.log_session import LogClock, LogEntry, log_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_ITERATION = re.compile(r"\biter = \d+, global_rank = (\d+), ")
_FIGURE = re.compile(r"(\w+)'?(?: =|:) ([\d.]+(?:ms|s)?|N/A)")
_STAMP = re.compile(r"timestamp = (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)")
_JSON = re.compile(r'\{"Active Request Count":.*\}')
_JSON_STAMP = re.compile(r"(\d\d)-(\d\d)-(\d{4}) (\d\d:\d\d:\d\d)")
_UNITS_NS = {"ms": 1e6, "s": 1e9}


def read(file: ForeignFile) -> ForeignSession | None:
    """The session in the log; None if it is no log of TensorRT-LLM."""
    if _ITERATION.search(file.head) is None and _JSON.search(file.head) is None:
        return None
    clock, entries = LogClock(file), []
    for number, line in file.lines():
        if (head := _ITERATION.search(line)) is not None:
            entries.append(_of_torch(file, clock, number, line, head[1]))
        elif (found := _JSON.search(line)) is not None:
            try:
                told = json.loads(found[0])
            except ValueError as error:
                raise file.error(number, "", "JSON", found[0]) from error
            entries.append(_of_cpp(clock, Fields(file, number, told)))
    return log_session(file, "tensorrt-llm", entries, None)


def _of_torch(file: ForeignFile, clock: LogClock, number: int, line: str, rank: str) -> LogEntry:
    stamp = _STAMP.search(line)
    if stamp is None:
        raise file.error(number, "timestamp", "YYYY-MM-DD HH:MM:SS", line.strip())
    figures = dict(_FIGURE.findall(line))
    name = next((each for each in ("host_step_time", "elapsed_time") if each in figures), "")
    lasted = re.fullmatch(r"([\d.]+)(ms|s)", figures.pop(name, ""))
    told = Fields(file, number, {key: value for key, value in figures.items() if value != "N/A"})
    if lasted is None:
        raise told.error(name or "host_step_time", "a time in ms or s", None)
    return LogEntry(
        wall_ns=clock.wall_ns(number, stamp[1], stamp[2]),
        rank=f"rank {rank}",
        is_step=True,
        elapsed_ns=round(told.as_number(name, lasted[1], 1e7) * _UNITS_NS[lasted[2]]),
        num_prompt=told.count("num_ctx_tokens"),
        num_output=told.count("num_generation_tokens"),
        kv_used=told.number("kv_cache_util", most=1.0),
    )


def _of_cpp(clock: LogClock, told: Fields) -> LogEntry:
    stamp = _JSON_STAMP.fullmatch(told.text("Timestamp"))
    if stamp is None:
        raise told.error("Timestamp", "MM-DD-YYYY HH:MM:SS", told.values.get("Timestamp"))
    month, day, year, time = stamp.groups()
    active, scheduled = told.count("Active Request Count"), told.count("Scheduled Requests")
    used, blocks = told.count("Used KV cache blocks"), told.count("Max KV cache blocks")
    return LogEntry(
        wall_ns=clock.wall_ns(told.line, f"{year}-{month}-{day}", time),
        rank="the only rank",
        is_step=True,
        num_prompt=told.count("Total Context Tokens"),
        num_output=told.count("Generation Requests"),
        num_running=scheduled,
        num_waiting=None if active is None or scheduled is None else max(0, active - scheduled),
        kv_used=None if used is None or not blocks else min(1.0, used / blocks),
    )
