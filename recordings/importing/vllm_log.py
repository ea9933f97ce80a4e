"""The log of a vLLM server: its line every ten seconds, and its iteration details.

Form of the lines: vLLM until 0.32, `vllm/v1/metrics/loggers.py`.
"""

import re

from stepscope.recordings.importing.log_session import LogFormat, LogLine

_EVERY_S = 10.0  # VLLM_LOG_STATS_INTERVAL, unless the log shows another
_STAMP = re.compile(r"\b((?:\d{4}-)?\d\d-\d\d) (\d\d:\d\d:\d\d)")
_RANK = re.compile(r"Engine (\d+): |(\d+ Engines) Aggregated: |EngineCore_DP(\d+)")
_FIGURE = re.compile(r"\b([A-Z][A-Za-z ]*): (-?[\d.]+)")
_ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\S+) context tokens, "
    r"\d+ generation requests, (\S+) generation tokens, "
    r"iteration elapsed time: (\S+) ms(?! \(dummy\))"
)
_OF_ITERATION = ("context tokens", "generation tokens", "iteration elapsed time")


_NAMES = {
    "Avg prompt throughput": "prompt_rate",
    "Avg generation throughput": "output_rate",
    "Running": "num_running",
    "Pending": "num_waiting",
    "Waiting": "num_waiting",
    "Preemptions": "num_preempted",
    "context tokens": "num_prompt",
    "generation tokens": "num_output",
    "iteration elapsed time": "elapsed_ms",
    "KV cache usage": "kv_percent",
}


def _line(line: str) -> LogLine | None:
    iteration = _ITERATION.search(line)
    if iteration is None and "Avg prompt throughput: " not in line:
        return None
    # The name of the device (GPU, CPU, TPU) stands before that of the cache.
    figures = {
        "KV cache usage" if name.endswith("KV cache usage") else name: value
        for name, value in _FIGURE.findall(line)
    }
    if iteration is not None:
        figures |= dict(zip(_OF_ITERATION, iteration.groups(), strict=True))
    rank, stamp = _RANK.search(line), _STAMP.search(line)
    number = "0" if rank is None else rank[rank.lastindex or 0].lstrip("0") or "0"
    date, clock = (None, "") if stamp is None else stamp.groups()
    return LogLine(date, clock, f"engine {number}", figures, _NAMES)


FORMAT = LogFormat("vllm", _line, _EVERY_S)
