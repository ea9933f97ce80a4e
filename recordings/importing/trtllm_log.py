"""The log of a TensorRT-LLM server with `print_iter_log`: a line for each iteration.

Form of the lines: TensorRT-LLM 1.x, `tensorrt_llm/_torch/pyexecutor/py_executor.py`.
"""

import re

from stepscope.recordings.importing.log_session import LogFormat, LogLine

_ITERATION = re.compile(
    r"\biter = \d+, global_rank = (\d+), .*timestamp = (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)"
)
_FIGURE = re.compile(r"(\w+)'?(?: =|:) ([\d.]+)")  # N/A is no figure


_NAMES = {
    "host_step_time": "elapsed_ms",
    "num_ctx_tokens": "num_prompt",
    "num_generation_tokens": "num_output",
    "kv_cache_util": "kv_used",
}


def _line(line: str) -> LogLine | None:
    if (head := _ITERATION.search(line)) is None:
        return None
    return LogLine(head[2], head[3], f"rank {head[1]}", dict(_FIGURE.findall(line)), _NAMES)


FORMAT = LogFormat("tensorrt-llm", _line)
