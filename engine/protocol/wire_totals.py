"""Telemetry: totals, from an engine that does not publish single requests. A part of `wire`.

Of an engine that publishes requests and no blocks, they only tell of the KV cache.

Counts are for one record. A record is for one forward step, or for all steps of some seconds
(`EngineInfo.totals_every_s`). None is unknown.
"""

from msgspec import Struct


class LatencyEstimate(Struct, array_like=True, frozen=True, gc=False):
    """`count` samples of about this latency, from one bucket of a histogram."""

    ms: float
    count: int


class Totals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts and latencies over all requests, from an engine that does not name requests."""

    num_steps: int | None = None
    num_prompt_tokens: int | None = None  # of prompts that were prefilled, cached ones included
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompts, found in the prefix cache
    num_queried_tokens: int | None = None  # of the prompts, looked up in the prefix cache
    num_preempted: int | None = None
    num_finished: int | None = None
    is_load_known: bool = True  # false: ignore the record's counts of running and waiting requests
    kv_used: float | None = None  # share of the KV cache that requests hold, 0 to 1
    ttft: list[LatencyEstimate] = []
    itl: list[LatencyEstimate] = []
    tpot: list[LatencyEstimate] = []  # mean per output token of each finished request
