"""`Meters`: the counters and histograms of an engine, under vLLM's names if they mean the same.

Names and buckets are those of vLLM 0.32. Three things count slightly differently:
- `iteration_tokens_total` has the tokens that each step computed. vLLM counts a whole prompt in the
  step that completes the prompt.
- An aborted request counts only in the number of requests by finish reason, not in the latency
  histograms.
- No latency includes the time in which an operator had paused the engine.
"""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Histogram

_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# Our own bounds, because a step of a small model takes a fraction of a millisecond.
_STEP_SECONDS = tuple(
    mantissa * 10.0**power for power in range(-4, 1) for mantissa in (1.0, 2.0, 5.0)
)
_DEFAULT_LENGTH = 1_048_576
_COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Preemptions.",
    "vllm:prompt_tokens": "Prompt tokens of requests past prefill.",
    "vllm:prompt_tokens_cached": "Prompt tokens that came from the prefix cache.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:request_success": "Requests that ended, by reason.",
    "stepscope_requests_within_levels": "Requests that finished with their first token within the "
    "TTFT level and each next one within the ITL level.",
    "stepscope_scheduled_tokens": "Tokens computed, recomputed ones included, by phase.",
    "stepscope_steps": "Forward steps.",
    "stepscope_requests_rejected": "Requests that were turned away.",
    "stepscope_requests_unsound_logits": "Requests ended because their logits were not finite.",
    "stepscope_kv_blocks_evicted": "Cached blocks overwritten.",
    "stepscope_pauses": "Times that an operator paused the engine.",
    "stepscope_paused_seconds": "Time in which an operator had paused the engine.",
    "stepscope_telemetry_lost": "Messages of the engine that were lost: other metrics lack them.",
}
_LABELS = {"vllm:request_success": ["finished_reason"], "stepscope_scheduled_tokens": ["phase"]}
_HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", _STEP_TOKENS),
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN_SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", _TOKEN_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean gap of a request.", _TOKEN_SECONDS),
    "vllm:e2e_request_latency_seconds": ("Arrival to end.", _REQUEST_SECONDS),
    "vllm:request_queue_time_seconds": ("Arrival to first step.", _REQUEST_SECONDS),
    "vllm:request_inference_time_seconds": ("First step to last token.", _REQUEST_SECONDS),
    "vllm:request_prefill_time_seconds": ("First step to first token.", _REQUEST_SECONDS),
    "vllm:request_decode_time_seconds": ("First token to last token.", _REQUEST_SECONDS),
    "vllm:request_num_preemptions": ("How often a request was preempted.", _PREEMPTIONS),
    "stepscope_step_seconds": ("Schedule to tokens of a step.", _STEP_SECONDS),
    "stepscope_schedule_seconds": ("Scheduling of a step.", _STEP_SECONDS),
    # Lengths, with bounds up to the longest request.
    "vllm:request_prompt_tokens": ("Length of a prompt.", ()),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that were not cached.", ()),
    "vllm:request_generation_tokens": ("Length of an output.", ()),
    "vllm:request_params_max_tokens": ("What max_tokens requests ask for.", ()),
}


class Meters:
    """Counts from the start of this process, across engine restarts, in `registry`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters = {
            name: Counter(name, text, _LABELS.get(name, ()), registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._histograms: dict[str, Histogram] = {}
        for reason in ("stop", "length", "abort"):
            self.count("vllm:request_success", 0, reason)
        for phase in ("prefill", "decode"):
            self.count("stepscope_scheduled_tokens", 0, phase)
        self.size(None)

    def count(self, name: str, number: float = 1, *labels: str) -> None:
        """Add to a counter."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(number)

    def observe(self, name: str, value: float, number: int = 1) -> None:
        """Add `number` equal values to a histogram.

        `Histogram.observe` adds one, at the same cost. There is one for each token of each step,
        which would slow down the streams on the same core.
        """
        histogram = self._histograms[name]
        histogram._sum.inc(value * number)
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(number)

    def size(self, max_model_len: int | None) -> None:
        """Make the histograms of lengths anew, for requests of up to `max_model_len` tokens."""
        lengths = length_bounds(max_model_len or _DEFAULT_LENGTH)
        for name, (text, bounds) in _HISTOGRAMS.items():
            if name in self._histograms:
                if bounds:
                    continue
                self.registry.unregister(self._histograms[name])
            self._histograms[name] = Histogram(
                name, text, buckets=bounds or lengths, registry=self.registry
            )


def length_bounds(max_model_len: int) -> tuple[float, ...]:
    """Return bucket bounds for lengths in tokens: 1, 2, 5, 10, ... up to the longest request."""
    powers = range(len(str(max_model_len)))
    bounds = [float(mantissa * 10**power) for power in powers for mantissa in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= max_model_len)
