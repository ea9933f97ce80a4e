"""The lines that the servers of vLLM, SGLang and TensorRT-LLM print about their steps."""

import re

from stepscope.recordings.importing.log_session import LogFormat, LogLine

# vLLM until 0.32, `vllm/v1/metrics/loggers.py`: a line every ten seconds, and iteration details.
_VLLM_EVERY_S = 10.0  # VLLM_LOG_STATS_INTERVAL, unless the log shows another
_VLLM_STAMP = re.compile(r"\b((?:\d{4}-)?\d\d-\d\d) (\d\d:\d\d:\d\d)")
_VLLM_RANK = re.compile(r"Engine (\d+): |(\d+ Engines) Aggregated: |EngineCore_DP(\d+)")
_VLLM_FIGURE = re.compile(r"\b([A-Z][A-Za-z ]*): (-?[\d.]+)")
_VLLM_ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\S+) context tokens, "
    r"\d+ generation requests, (\S+) generation tokens, "
    r"iteration elapsed time: (\S+) ms(?! \(dummy\))"
)
_OF_ITERATION = ("context tokens", "generation tokens", "iteration elapsed time")
_VLLM_NAMES = {
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


def _vllm(line: str) -> LogLine | None:
    iteration = _VLLM_ITERATION.search(line)
    if iteration is None and "Avg prompt throughput: " not in line:
        return None
    # The name of the device (GPU, CPU, TPU) stands before that of the cache.
    figures = {
        "KV cache usage" if name.endswith("KV cache usage") else name: value
        for name, value in _VLLM_FIGURE.findall(line)
    }
    if iteration is not None:
        figures |= dict(zip(_OF_ITERATION, iteration.groups(), strict=True))
    rank, stamp = _VLLM_RANK.search(line), _VLLM_STAMP.search(line)
    number = "0" if rank is None else rank[rank.lastindex or 0].lstrip("0") or "0"
    date, clock = (None, "") if stamp is None else stamp.groups()
    return LogLine(date, clock, f"engine {number}", figures, _VLLM_NAMES)


# SGLang until 0.5, `log_prefill_stats` and `report_decode_stats` of its scheduler: a prefill line
# is about one step; a decode line about the 40 or so since the one before.
_SGLANG_BATCH = re.compile(
    r"\[(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)(?: ([A-Z]+\d[A-Z\d ]*))?\] (Prefill|Decode) batch\b"
)
_SGLANG_FIGURE = re.compile(r"(#?[A-Za-z][\w\- ()/]*?): (-?[\w.]+)")
_SGLANG_NAMES = {
    "#new-token": "num_prompt",
    "#cached-token": "num_cached",
    "#running-req": "num_running",
    "#queue-req": "num_waiting",
    "token usage": "kv_used",
    "full token usage": "kv_used",  # of layers with full attention, if others have less
}
_OF_DECODES = {"gen throughput (token/s)": "output_rate", "cuda graph": "has_graph"}


def _sglang(line: str) -> LogLine | None:
    if (head := _SGLANG_BATCH.search(line)) is None:
        return None
    names = _SGLANG_NAMES | _OF_DECODES if head[4] == "Decode" else _SGLANG_NAMES
    figures = dict(_SGLANG_FIGURE.findall(line, head.end()))
    return LogLine(head[1], head[2], head[3] or "rank 0", figures, names)


# TensorRT-LLM 1.x with `print_iter_log`, `tensorrt_llm/_torch/pyexecutor/py_executor.py`: a line
# for each iteration.
_TRTLLM_ITERATION = re.compile(
    r"\biter = \d+, global_rank = (\d+), .*timestamp = (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)"
)
_TRTLLM_FIGURE = re.compile(r"(\w+)'?(?: =|:) ([\d.]+)")  # N/A is no figure
_TRTLLM_NAMES = {
    "host_step_time": "elapsed_ms",
    "num_ctx_tokens": "num_prompt",
    "num_generation_tokens": "num_output",
    "kv_cache_util": "kv_used",
}


def _trtllm(line: str) -> LogLine | None:
    if (head := _TRTLLM_ITERATION.search(line)) is None:
        return None
    figures = dict(_TRTLLM_FIGURE.findall(line))
    return LogLine(head[2], head[3], f"rank {head[1]}", figures, _TRTLLM_NAMES)


LOGS = (
    LogFormat("vllm", _vllm, _VLLM_EVERY_S),
    LogFormat("sglang", _sglang),
    LogFormat("tensorrt-llm", _trtllm),
)
