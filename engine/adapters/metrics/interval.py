"""Compares two readings of one server: what its counters and histograms gained in between."""

import math

from stepscope.engine.adapters.metrics.reading import Reading
from stepscope.engine.protocol.wire import LatencyEstimate, Totals

_POINTS = 8  # the samples of a bucket are spread evenly over these, as Prometheus' quantiles assume
_MAX_COUNT = 2**31


def has_restarted(before: Reading, now: Reading) -> bool:
    """Whether the server was restarted, or replaced, between two readings.

    True if a counter went down, or if the engine or its start time changed.
    """
    if before.engine != now.engine or before.start_s != now.start_s:
        return True
    if any(now.counters.get(key, 0.0) < value for key, value in before.counters.items()):
        return True
    return any(
        now.histograms.get(kind, {}).get(math.inf, 0.0) < buckets.get(math.inf, 0.0)
        for kind, buckets in before.histograms.items()
    )


def totals(before: Reading, now: Reading) -> Totals:
    """Return how much each counter grew between two readings, and the latencies of new samples.

    A counter missing in either reading gives None. `kv_used` is the value of `now`.
    """

    def counted(key: str) -> int | None:
        if key not in before.counters or key not in now.counters:
            return None
        return min(_MAX_COUNT, max(0, round(now.counters[key] - before.counters[key])))

    return Totals(
        num_steps=counted("steps"),
        num_prompt_tokens=counted("prompt_tokens"),
        num_output_tokens=counted("output_tokens"),
        num_cached_tokens=counted("cached_tokens"),
        num_queried_tokens=counted("queried_tokens"),
        num_preempted=counted("preempted"),
        num_finished=counted("finished"),
        is_load_known=now.num_running is not None and now.num_waiting is not None,
        kv_used=now.kv_used,
        ttft=_estimates(before, now, "ttft"),
        itl=_estimates(before, now, "itl"),
        tpot=_estimates(before, now, "tpot"),
    )


def _estimates(before: Reading, now: Reading, kind: str) -> list[LatencyEstimate]:
    """Return estimates of the latencies that a histogram gained, spread evenly within each bucket.

    Samples above the highest finite bound get this bound as value, because their values are
    unknown.
    """
    was, found = before.histograms.get(kind, {}), []
    low_s, seen = 0.0, 0.0
    for bound_s, cumulative in now.histograms.get(kind, {}).items():
        come = cumulative - was.get(bound_s, 0.0)
        count = min(_MAX_COUNT, round(come - seen))
        seen = max(seen, come)
        high_s = low_s if math.isinf(bound_s) else bound_s
        if count > 0:
            found += _spread(low_s * 1e3, high_s * 1e3, count)
        low_s = high_s
    return found


def _spread(low_ms: float, high_ms: float, count: int) -> list[LatencyEstimate]:
    if low_ms == high_ms:
        return [LatencyEstimate(low_ms, count)]
    number = min(_POINTS, count)
    width = (high_ms - low_ms) / number
    each, rest = divmod(count, number)
    return [
        LatencyEstimate(low_ms + (place + 0.5) * width, each + (place < rest))
        for place in range(number)
    ]
