"""The log of a TensorRT-LLM server with `print_iter_log`: a line for each iteration.

Form of the lines: TensorRT-LLM 1.x, `tensorrt_llm/_torch/pyexecutor/py_executor.py`.
"""

import re

from stepscope.recordings.importing.log_session import LogClock, LogEntry, log_session
from stepscope.recordings.importing.source import ForeignFile, ForeignSession

_ITERATION = re.compile(r"\biter = \d+, global_rank = (\d+), ")
_STAMP = re.compile(r"timestamp = (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)")
_FIGURE = re.compile(r"(\w+)'?(?: =|:) ([\d.]+)")  # N/A is no figure


_NAMES = {
    "host_step_time": "elapsed_ms",
    "num_ctx_tokens": "num_prompt",
    "num_generation_tokens": "num_output",
    "kv_cache_util": "kv_used",
}


def read(file: ForeignFile) -> ForeignSession | None:
    """The session in the log; None if it is no log of TensorRT-LLM."""
    if _ITERATION.search(file.head) is None:
        return None
    clock, entries = LogClock(file), []
    for number, line in file.lines():
        if (head := _ITERATION.search(line)) is None:
            continue
        if (stamp := _STAMP.search(line)) is None:
            raise file.error(f"{number}, timestamp", "YYYY-MM-DD HH:MM:SS", line)
        entry = file.fields(number, dict(_FIGURE.findall(line)), LogEntry, _NAMES)
        if entry.elapsed_ms is None:
            raise file.error(f"{number}, host_step_time", "milliseconds", "none")
        entry.wall_ns, entry.rank = clock.wall_ns(number, stamp[1], stamp[2]), f"rank {head[1]}"
        entries.append(entry)
    return log_session(file, "tensorrt-llm", entries)
