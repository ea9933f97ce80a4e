"""The metric names of each engine, for all versions, the newest first.

Each entry lists alternatives: the first name that a server exports is used. Names are sample names
(with the `_total` of a counter). For a histogram, the name is without `_bucket`.

Sources, read in the code of the releases:
- vLLM 0.10 to 0.33, `vllm/v1/metrics/loggers.py`. `gpu_cache_usage_perc` and `gpu_prefix_cache_*`
  until 0.11; `time_per_output_token_seconds` (the time between two tokens, despite its name) until
  0.15, `inter_token_latency_seconds` from 0.10.2; `num_requests_waiting_by_reason` from 0.20.2.
- SGLang 0.5.23, `sglang/srt/observability/metrics_collector.py`; `time_per_output_token_seconds`
  before 0.5 was renamed to `inter_token_latency_seconds`.
- TensorRT-LLM 1.0 to 1.3, `tensorrt_llm/metrics/collector.py`: until 1.1 only latencies, finished
  requests and the KV cache; its time per output token is the mean of a request.
- stepscope exports vLLM's names (`engine/http/metrics/meters.py`) and its own.
"""

from typing import NamedTuple

_Names = tuple[str, ...]


class EngineNames(NamedTuple):
    """The sample names of one engine.

    An empty tuple means that the engine does not export the metric.
    """

    engine: str
    prefix: str  # of its samples
    running: _Names
    waiting: _Names
    waiting_by_reason: str  # labelled `reason`
    kv_used: _Names  # a share, 0 to 1
    prompt_tokens: _Names
    output_tokens: _Names
    queried_tokens: _Names
    cached_tokens: _Names
    preempted: _Names
    finished: _Names
    steps: _Names
    ttft: _Names
    itl: _Names
    tpot: _Names


VLLM = EngineNames(
    engine="vllm",
    prefix="vllm:",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    waiting_by_reason="vllm:num_requests_waiting_by_reason",
    kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prompt_tokens=("vllm:prompt_tokens_total",),
    output_tokens=("vllm:generation_tokens_total",),
    queried_tokens=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    cached_tokens=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    preempted=("vllm:num_preemptions_total",),
    finished=("vllm:request_success_total",),
    steps=("vllm:iteration_tokens_total_count",),
    ttft=("vllm:time_to_first_token_seconds",),
    itl=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    tpot=("vllm:request_time_per_output_token_seconds",),
)
SGLANG = EngineNames(
    engine="sglang",
    prefix="sglang:",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    waiting_by_reason="",
    kv_used=("sglang:token_usage",),
    prompt_tokens=("sglang:prompt_tokens_total",),
    output_tokens=("sglang:generation_tokens_total",),
    queried_tokens=("sglang:prompt_tokens_total",),
    cached_tokens=("sglang:cached_tokens_total",),
    preempted=("sglang:num_retracted_requests_total",),
    finished=("sglang:num_requests_total",),
    steps=(),
    ttft=("sglang:time_to_first_token_seconds",),
    itl=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    tpot=("sglang:request_time_per_output_token_seconds",),
)
TENSORRT_LLM = EngineNames(
    engine="tensorrt-llm",
    prefix="trtllm_",
    running=("trtllm_num_requests_running",),
    waiting=("trtllm_num_requests_waiting",),
    waiting_by_reason="",
    kv_used=("trtllm_kv_cache_utilization",),
    prompt_tokens=("trtllm_prompt_tokens_total",),
    output_tokens=("trtllm_generation_tokens_total",),
    queried_tokens=("trtllm_prompt_tokens_total",),
    cached_tokens=("trtllm_prompt_cached_tokens_total",),
    preempted=(),
    finished=("trtllm_request_success_total", "trtllm_num_requests_completed_total"),
    steps=(),
    ttft=("trtllm_time_to_first_token_seconds",),
    itl=(),
    tpot=("trtllm_time_per_output_token_seconds",),
)
STEPSCOPE = VLLM._replace(
    engine="stepscope",
    prefix="stepscope_",
    waiting_by_reason="stepscope_requests_waiting",
    steps=("stepscope_steps_total",),
)
# Ours comes first: it exports vLLM's names too.
ENGINES = (STEPSCOPE, VLLM, SGLANG, TENSORRT_LLM)
START_TIME = "process_start_time_seconds"
