"""Summarizes a session in a few lines, at the end of a demo without a screen."""

from collections.abc import Iterator

from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import Series


def summary(history: History) -> Iterator[str]:
    """Yield lines with the figures of a session: steps, tokens, latencies and so on."""
    rates = history.rates(window_s=None)
    latency = history.latency(window_s=None)
    yield f"steps      {rates.num_steps:,} in {rates.seconds:.1f} s ({_rate(rates.steps_per_s)})"
    yield (f"tokens     out {_rate(rates.output_tokens_per_s)}, in {_rate(rates.in_tokens_per_s)}")
    yield f"TTFT       {_percentiles(latency.ttft)}"
    yield f"ITL        {_percentiles(latency.itl)}"
    mixed = "unknown" if rates.mixed_share is None else f"{rates.mixed_share:.0%}"
    yield f"mixed      {mixed} of the steps held prefill and decode"
    yield f"gaps       {len(history.gaps)}"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}/s"


def _percentiles(series: Series) -> str:
    if series.p50_ms is None or series.p99_ms is None:
        return "no samples"
    return f"p50 {series.p50_ms:,.1f} ms  p99 {series.p99_ms:,.1f} ms"
