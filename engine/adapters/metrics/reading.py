"""`Reading`: the values in one response of a metrics endpoint; `totals`: what two of them gained.

Which series of a metric count: those that differ only in a rank within their replica (`tp_rank`,
`pp_rank`, `moe_ep_rank`; every `..._rank` but that of data parallelism) are copies of one value, of
which the lowest rank counts. With SGLang's DP attention each `dp_rank` has another lowest `tp_rank`
(sglang#6892). A series with an empty `priority` is the total of those with one. All others
(replicas, models, reasons, sources) are parts: counts are summed up, a share is their mean.

The names of each engine are for all versions, the newest first: the first that a server exports is
used. They are sample names (with the `_total` of a counter; of histograms without `_bucket`).
Sources, read in the code of the releases:
- vLLM 0.10 to 0.33, `vllm/v1/metrics/loggers.py`. `gpu_cache_usage_perc` and `gpu_prefix_cache_*`
  until 0.11; `time_per_output_token_seconds` (the time between two tokens, despite its name) until
  0.15, `inter_token_latency_seconds` from 0.10.2; `num_requests_waiting_by_reason` from 0.20.2.
- SGLang 0.5.23, `sglang/srt/observability/metrics_collector.py`; `time_per_output_token_seconds`
  before 0.5 was renamed to `inter_token_latency_seconds`.
- TensorRT-LLM 1.0 to 1.3, `tensorrt_llm/metrics/collector.py`: until 1.1 only latencies, finished
  requests and the KV cache; its time per output token is the mean of a request.
- stepscope exports vLLM's names (`engine/http/metrics_reducer.py`) and its own.
"""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stepscope.engine.protocol.wire import LatencyEstimate, Totals

_COUNTERS = (
    "prompt_tokens", "output_tokens", "queried_tokens", "cached_tokens", "preempted", "finished",
    "steps",
)  # fmt: skip
_HISTOGRAMS = ("ttft", "itl", "tpot")


# What a metric tells, and its names in vLLM, SGLang and TensorRT-LLM without their prefixes; empty:
# it is not exported. `kv_used` is a share, 0 to 1; `reasons` are labelled `reason`.
_ITL = "inter_token_latency_seconds time_per_output_token_seconds"
_TPOT = "request_time_per_output_token_seconds"
_NAMES = {
    "running": ("num_requests_running", "num_running_reqs", "num_requests_running"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "num_requests_waiting"),
    "reasons": ("num_requests_waiting_by_reason", "", ""),
    "kv_used": ("kv_cache_usage_perc gpu_cache_usage_perc", "token_usage", "kv_cache_utilization"),
    "prompt_tokens": ("prompt_tokens_total",) * 3,
    "output_tokens": ("generation_tokens_total",) * 3,
    "queried_tokens": (
        "prefix_cache_queries_total gpu_prefix_cache_queries_total",
        "prompt_tokens_total",
        "prompt_tokens_total",
    ),
    "cached_tokens": (
        "prefix_cache_hits_total gpu_prefix_cache_hits_total",
        "cached_tokens_total",
        "prompt_cached_tokens_total",
    ),
    "preempted": ("num_preemptions_total", "num_retracted_requests_total", ""),
    "finished": (
        "request_success_total",
        "num_requests_total",
        "request_success_total num_requests_completed_total",
    ),
    "steps": ("iteration_tokens_total_count", "", ""),
    "ttft": ("time_to_first_token_seconds",) * 3,
    "itl": (_ITL, _ITL, ""),
    "tpot": (_TPOT, _TPOT, "time_per_output_token_seconds"),
}


def _names(prefix: str, column: int) -> dict[str, tuple[str, ...]]:
    endings = {kind: "_bucket" if kind in _HISTOGRAMS else "" for kind in _NAMES}
    return {
        kind: tuple(prefix + name + endings[kind] for name in names[column].split())
        for kind, names in _NAMES.items()
    }


_OWN = {"reasons": ("stepscope_requests_waiting",), "steps": ("stepscope_steps_total",)}
# Each engine, its prefix and its names. Ours comes first: it exports vLLM's names too.
ENGINES = (
    ("stepscope", "stepscope_", _names("vllm:", 0) | _OWN),
    ("vllm", "vllm:", _names("vllm:", 0)),
    ("sglang", "sglang:", _names("sglang:", 1)),
    ("tensorrt-llm", "trtllm_", _names("trtllm_", 2)),
)
_START_TIME = "process_start_time_seconds"
_NOT_FINISHED = ("abort", "error")
_MAX_BUCKETS = 200
_MAX_COUNT = 2**31


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of one response, from the series that count; None or empty: not exported."""

    engine: str
    model: str
    start_s: float | None  # when the server started, Unix time
    num_running: int | None
    num_waiting: int | None
    waiting_reasons: dict[str, int] | None
    kv_used: float | None
    counters: dict[str, float] = field(default_factory=dict)  # by what they tell
    histograms: dict[str, dict[float, float]] = field(default_factory=dict)  # cumulative, by bound


def read(text: str) -> Reading | None:
    """Return the values in a text of Prometheus; None if it has no metric of a known engine."""
    text = f"\n{text}"
    known = next((each for each in ENGINES if f"\n{each[1]}" in text), None)
    if known is None:
        return None
    engine, _, names = known
    found = _counted(_samples(text, {*chain(*names.values()), _START_TIME}))

    def of(kind: str) -> list[Sample]:
        return next((found[name] for name in names[kind] if name in found), [])

    reasons: Counter[str] = Counter()
    for each in of("reasons"):
        reasons[each.labels.get("reason", "")[:40]] += _count(each.value) or 0
    models = (each.labels.get("model_name") for some in found.values() for each in some)
    shares = [each.value for each in of("kv_used")]
    return Reading(
        engine=engine,
        model=", ".join(dict.fromkeys(each for each in models if each)),
        start_s=_sum(found.get(_START_TIME, [])),
        num_running=_count(_sum(of("running"))),
        num_waiting=_count(_sum(of("waiting"))),
        waiting_reasons=dict(+reasons) if of("reasons") else None,
        kv_used=None if not shares else min(1.0, max(0.0, sum(shares) / len(shares))),
        counters={kind: total for kind in _COUNTERS if (total := _sum(of(kind))) is not None},
        histograms={kind: buckets for kind in _HISTOGRAMS if (buckets := _buckets(of(kind)))},
    )


def _samples(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """Yield the samples whose name is in `wanted`. Lines that cannot be parsed are skipped."""
    for line in text.splitlines():
        if line.partition("{")[0].partition(" ")[0] not in wanted:
            continue
        try:
            for family in text_string_to_metric_families(f"{line}\n"):
                yield from family.samples
        except ValueError:
            continue


def _counted(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples that count, by name."""
    lowest: dict[object, tuple[list[tuple[str, int, str]], Sample]] = {}
    for sample in samples:
        if not math.isfinite(sample.value) or sample.labels.get("finished_reason") in _NOT_FINISHED:
            continue
        labels = sorted(sample.labels.items())
        # In the order of numbers: 9 comes before 10.
        ranks = [(name, len(value), value) for name, value in labels if _is_copied_over(name)]
        rest = tuple(each for each in labels if not _is_copied_over(each[0]))
        key = sample.name, rest
        if key not in lowest or ranks < lowest[key][0]:
            lowest[key] = ranks, sample
    found: dict[str, list[Sample]] = {}
    for _, sample in lowest.values():
        found.setdefault(sample.name, []).append(sample)
    return found


def _is_copied_over(label: str) -> bool:
    is_rank = label.endswith("_rank") and not label.startswith(("dp_", "data_parallel_"))
    return is_rank or label == "priority"


def _sum(samples: list[Sample]) -> float | None:
    return sum(each.value for each in samples) if samples else None


def _count(value: float | None) -> int | None:
    return None if value is None else max(0, min(round(value), _MAX_COUNT))


def _buckets(samples: list[Sample]) -> dict[float, float]:
    """Return a histogram, summed over all its series: cumulative count by upper bound in s."""
    found: dict[float, float] = defaultdict(float)
    for each in samples:
        with contextlib.suppress(KeyError, ValueError):
            bound = float(each.labels["le"])
            if not math.isnan(bound):
                found[bound] += each.value
    return dict(sorted(found.items())) if len(found) <= _MAX_BUCKETS else {}


_POINTS = 8  # the samples of a bucket are spread evenly over these, as Prometheus' quantiles assume


def has_restarted(before: Reading, now: Reading) -> bool:
    """Whether the server was restarted, or replaced, between two readings."""
    return (
        (before.engine, before.start_s) != (now.engine, now.start_s)
        or any(now.counters.get(key, 0.0) < value for key, value in before.counters.items())
        or any(
            now.histograms.get(kind, {}).get(math.inf, 0.0) < buckets.get(math.inf, 0.0)
            for kind, buckets in before.histograms.items()
        )
    )


def totals(before: Reading, now: Reading) -> Totals:
    """Return how much each counter grew between two readings, and the latencies of new samples.

    A counter missing in either reading gives None. `kv_used` is the value of `now`.
    """
    told: dict[str, Any] = {
        f"num_{key}": _count(now.counters[key] - before.counters[key])
        for key in now.counters.keys() & before.counters.keys()
    }
    told |= {kind: _estimates(before, now, kind) for kind in _HISTOGRAMS}
    is_known = now.num_running is not None and now.num_waiting is not None
    return Totals(is_load_known=is_known, kv_used=now.kv_used, **told)


def _estimates(before: Reading, now: Reading, kind: str) -> list[LatencyEstimate]:
    """Return estimates of the latencies that a histogram gained, spread evenly within each bucket.

    Samples above the highest finite bound get this bound as value: theirs are unknown.
    """
    was, found = before.histograms.get(kind, {}), []
    low_ms, seen = 0.0, 0.0
    for bound_s, cumulative in now.histograms.get(kind, {}).items():
        come = cumulative - was.get(bound_s, 0.0)
        count = min(_MAX_COUNT, round(come - seen))
        seen = max(seen, come)
        high_ms = low_ms if math.isinf(bound_s) else bound_s * 1e3
        if count > 0:
            number = min(_POINTS, count) if low_ms < high_ms else 1
            width_ms, (each, rest) = (high_ms - low_ms) / number, divmod(count, number)
            found += [
                LatencyEstimate(low_ms + (place + 0.5) * width_ms, each + (place < rest))
                for place in range(number)
            ]
        low_ms = high_ms
    return found
