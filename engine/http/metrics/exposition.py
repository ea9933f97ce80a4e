"""`Exposition`: the metrics in Prometheus format, under vLLM's names if the meaning is the same.

Names, labels and buckets are those of vLLM 0.32. Two metrics count slightly differently:
- `iteration_tokens_total` has the tokens that each step computed. vLLM counts a whole prompt in the
  step that completes the prompt.
- An aborted request counts only in the number of requests by finish reason, not in the latency
  histograms.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from stepscope.engine.http.metrics.histogram import Histogram
from stepscope.engine.http.metrics.reducer import EngineMetrics
from stepscope.engine.protocol.silence import publishes

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LABELS = ("model_name", "engine")
_ENGINE = "0"
_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/health",
        "/metrics",
        "/version",
        "/reset_prefix_cache",
    }
)

_Value: TypeAlias = Callable[[EngineMetrics], float | None]

_GAUGES: list[tuple[str, str, _Value]] = [
    ("vllm:num_requests_running", "Requests in the batch.", lambda m: m.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for admission.", lambda m: m.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold; 1 is all of them.",
        lambda m: m.kv.used / max(1, m.kv.used + m.kv.cached + m.kv.empty) if m.kv else None,
    ),
    (
        "stepscope_kv_blocks_used",
        "KV blocks that requests hold.",
        lambda m: m.kv.used if m.kv else None,
    ),
    (
        "stepscope_kv_blocks_cached",
        "Free KV blocks whose content can still be hit.",
        lambda m: m.kv.cached if m.kv else None,
    ),
    (
        "stepscope_kv_blocks_empty",
        "KV blocks that hold nothing.",
        lambda m: m.kv.empty if m.kv else None,
    ),
    ("stepscope_token_budget", "Token budget of the latest step.", lambda m: m.token_budget),
    ("stepscope_max_num_seqs", "Most requests in the latest step.", lambda m: m.max_num_seqs),
    (
        "stepscope_goodput_requests_per_second",
        "Requests per second that finished within their service levels, over the last minute.",
        lambda m: m.goodput.per_s,
    ),
]
_COUNTERS: list[tuple[str, str, _Value]] = [
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda m: m.prefix_queries,
    ),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda m: m.prefix_hits),
    (
        "stepscope_requests_within_levels",
        "Requests that finished with their first token within the TTFT level and each next one "
        "within the ITL level.",
        lambda m: m.num_kept_levels,
    ),
    ("vllm:num_preemptions", "Preemptions.", lambda m: m.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens of requests past prefill.", lambda m: m.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens that came from the prefix cache.",
        lambda m: m.cached_prompt_tokens,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda m: m.generation_tokens),
    ("stepscope_steps", "Forward steps.", lambda m: m.num_steps),
    (
        "stepscope_requests_rejected",
        "Requests that were turned away.",
        lambda m: m.num_rejected,
    ),
    ("stepscope_kv_blocks_evicted", "Cached blocks overwritten.", lambda m: m.num_evicted_blocks),
    (
        "stepscope_telemetry_lost",
        "Messages of the engine that were lost: the other metrics lack them.",
        lambda m: m.num_lost_messages,
    ),
    (
        "stepscope_telemetry_healed",
        "Messages that came only when asked for again.",
        lambda m: m.num_healed_messages,
    ),
]
_HISTOGRAMS: list[tuple[str, str, Callable[[EngineMetrics], Histogram]]] = [
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", lambda m: m.step_tokens),
    (
        "vllm:time_to_first_token_seconds",
        "Arrival to first token.",
        lambda m: m.first_token_seconds,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a request.",
        lambda m: m.inter_token_seconds,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time of a token after the first, by request.",
        lambda m: m.output_token_seconds,
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival to end.", lambda m: m.e2e_seconds),
    ("vllm:request_queue_time_seconds", "Arrival to first step.", lambda m: m.queue_seconds),
    (
        "vllm:request_inference_time_seconds",
        "First step to last token.",
        lambda m: m.inference_seconds,
    ),
    (
        "vllm:request_prefill_time_seconds",
        "First step to first token.",
        lambda m: m.prefill_seconds,
    ),
    (
        "vllm:request_decode_time_seconds",
        "First token to last token.",
        lambda m: m.decode_seconds,
    ),
    ("vllm:request_prompt_tokens", "Length of a prompt.", lambda m: m.request_prompt_tokens),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens computed, without those from the cache.",
        lambda m: m.request_computed_tokens,
    ),
    (
        "vllm:request_generation_tokens",
        "Length of an output.",
        lambda m: m.request_generation_tokens,
    ),
    (
        "vllm:request_params_max_tokens",
        "What max_tokens requests ask for.",
        lambda m: m.request_max_tokens,
    ),
    (
        "vllm:request_num_preemptions",
        "How often a request was preempted.",
        lambda m: m.request_preemptions,
    ),
    ("stepscope_step_seconds", "Schedule to tokens of a step.", lambda m: m.step_seconds),
    ("stepscope_schedule_seconds", "Scheduling of a step.", lambda m: m.schedule_seconds),
]


class Exposition(Collector):
    """Exports all metrics as one text.

    Args:
        metrics: the engine's metrics.
        served_model_name: the model's name for clients. "": use the engine's name for the model.
        others: further collectors to export.
    """

    def __init__(
        self, metrics: EngineMetrics, served_model_name: str, others: Iterable[Collector] = ()
    ) -> None:
        self._metrics = metrics
        self._served_model_name = served_model_name
        self._responses: dict[tuple[str, int], int] = {}
        self._num_in_flight = 0
        self.is_engine_up = False
        self._registry = CollectorRegistry(auto_describe=False)
        for each in (self, *others):
            self._registry.register(each)

    def count_request(self, path: str, status: int) -> None:
        """Count one HTTP response. Status 0: the client disconnected before the response began."""
        key = (path if path in _PATHS else "other", status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def write(self, num_in_flight: int) -> bytes:
        self._num_in_flight = num_in_flight
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        info = metrics.info
        model = self._served_model_name or (info.model if info is not None else "")
        labels = [model, _ENGINE]
        if info is None or publishes(info):
            yield from self._service_samples(labels)
        yield from self._config()
        yield self._levels()
        yield from self._own()

    def _service_samples(self, labels: list[str]) -> Iterator[Metric]:
        """Yield the metrics that are computed from telemetry.

        Do not call it for an engine without telemetry: zeros would wrongly mean that there is no
        load.
        """
        metrics = self._metrics
        for name, text, value in _GAUGES:
            if (number := value(metrics)) is not None:
                gauge = GaugeMetricFamily(name, text, labels=_LABELS)
                gauge.add_metric(labels, number)
                yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(labels, value(metrics) or 0.0)
            yield counter
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            family.add_metric(labels, histogram(metrics).buckets(), histogram(metrics).sum)
            yield family
        yield self._finished(labels)
        yield self._waiting(labels)
        yield self._scheduled(labels)

    def _finished(self, labels: list[str]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in self._metrics.finished.items():
            family.add_metric([*labels, reason], count)
        return family

    def _waiting(self, labels: list[str]) -> Metric:
        family = GaugeMetricFamily(
            "stepscope_requests_waiting",
            "Requests that wait, by what they wait for.",
            labels=(*_LABELS, "reason"),
        )
        for reason, count in self._metrics.waiting_reasons.items():
            family.add_metric([*labels, reason], count)
        return family

    def _scheduled(self, labels: list[str]) -> Metric:
        family = CounterMetricFamily(
            "stepscope_scheduled_tokens",
            "Tokens computed, recomputed ones included, by phase.",
            labels=(*_LABELS, "phase"),
        )
        family.add_metric([*labels, "prefill"], self._metrics.scheduled_prefill_tokens)
        family.add_metric([*labels, "decode"], self._metrics.scheduled_decode_tokens)
        return family

    def _config(self) -> Iterator[Metric]:
        info = self._metrics.info
        if info is None:
            return
        values = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": str(info.dtype),
            "enable_prefix_caching": str(self._metrics.knobs.get("enable_prefix_caching")),
            "engine": _ENGINE,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is laid out.", labels=tuple(values)
        )
        family.add_metric(list(values.values()), 1)
        yield family

    def _levels(self) -> Metric:
        family = GaugeMetricFamily(
            "stepscope_service_level_seconds",
            "Service levels that stepscope_requests_within_levels_total counts by.",
            labels=("kind",),
        )
        family.add_metric(["ttft"], self._metrics.ttft_s)
        family.add_metric(["itl"], self._metrics.itl_s)
        return family

    def _own(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "stepscope_engine_up", "Whether the engine answers.", float(self.is_engine_up)
        )
        yield GaugeMetricFamily(
            "stepscope_http_requests_in_flight",
            "HTTP requests for tokens under way.",
            float(self._num_in_flight),
        )
        family = CounterMetricFamily(
            "stepscope_http_responses",
            "HTTP responses; status 0 is a client that hung up before its response.",
            labels=("path", "status"),
        )
        for (path, status), count in self._responses.items():
            family.add_metric([path, str(status)], count)
        yield family
