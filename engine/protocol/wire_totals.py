"""Telemetry: totals, from an engine that does not say which requests they are of. A part of `wire`.

Counts are those of one record: a forward step, or the seconds that a record sums up
(`EngineInfo.totals_every_s`). None is unknown.
"""

from msgspec import Struct


class LatencyEstimate(Struct, array_like=True, frozen=True, gc=False):
    """So many samples near a latency: they fell into a histogram's bucket around it."""

    ms: float
    count: int


class Totals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine counts without naming requests."""

    num_steps: int | None = None
    num_prompt_tokens: int | None = None  # of prompts that were prefilled, cached ones included
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompts, found in the prefix cache
    num_queried_tokens: int | None = None  # looked up in it
    num_preempted: int | None = None
    num_finished: int | None = None
    is_load_known: bool = True  # false: the record's running and waiting requests are no figures
    kv_used: float | None = None  # share of the KV cache that requests hold, 0 to 1
    ttft: list[LatencyEstimate] = []
    itl: list[LatencyEstimate] = []
    tpot: list[LatencyEstimate] = []  # mean of each request that ended
