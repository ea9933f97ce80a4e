"""`Sums` over the steps of a session or a part of it, and `figures_of`: the figures from them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.recordings.figures.table import KINDS, RANKS, latency_name
from stepscope.recordings.state.series.finished import KeptLevels
from stepscope.recordings.state.series.latency import LatencyKind
from stepscope.recordings.state.series.limits import LIMITS

Figures = Mapping[str, float | None]  # by name, each in its unit of the table; None is unknown


class LatencySpread(NamedTuple):
    """Percentiles of one latency.

    Attributes:
        at_ns: rank -> nearest-rank percentile; empty without samples.
        within_slo: share of samples within the service level; None without a level or samples.
    """

    num_samples: int = 0
    at_ns: Mapping[int, int] = {}
    within_slo: float | None = None

    def at(self, rank: int) -> int | None:
        """Return a percentile in nanoseconds; None without samples. Rank 100 is the maximum."""
        return self.at_ns.get(rank)


class Sums(NamedTuple):
    """Sums over steps, from which figures are computed; None is unknown."""

    seconds: float
    num_steps: int
    latencies: Mapping[LatencyKind, LatencySpread]
    kept: KeptLevels
    num_finished: int | None
    num_arrived: int | None
    num_in_tokens: int | None
    num_out_tokens: int | None
    num_queried_tokens: int | None
    num_hit_tokens: int | None
    num_preempted: int | None
    num_prefill_tokens: int
    num_recomputed_tokens: int | None
    recompute_ns: float | None  # step time spent on recomputed tokens
    num_evicted: int | None
    num_waiting: int  # summed up over steps, as are the next two
    num_kv_used: int | None
    num_kv_blocks: int | None
    kv_peak: float | None
    num_budget_tokens: int | None  # over all steps
    num_spent_tokens: int  # padding included, in steps with a budget
    num_mixed: int
    num_limited: Sequence[int]  # steps per entry of `LIMITS`; steps with unknown limit are left out
    busy_ns: int | None


def figures_of(sums: Sums) -> dict[str, float | None]:
    """Return name -> value of each figure in `FIGURES`.

    Values are in the figure's unit; None if unknown or without samples.
    """
    found: dict[str, float | None] = {}
    for kind in KINDS:
        spread = sums.latencies[kind]
        for rank in RANKS:
            ns = spread.at(rank)
            found[latency_name(kind, rank)] = None if ns is None else ns / 1e6
    seconds, steps = sums.seconds, sums.num_steps
    preempted = sums.num_preempted
    return found | {
        "ttft_within_slo": sums.latencies["ttft"].within_slo,
        "itl_within_slo": sums.latencies["itl"].within_slo,
        "goodput": per(sums.kept.num_kept, sums.kept.num_judged),
        "goodput_per_s": per(sums.kept.num_kept, seconds),
        "finished_per_s": per(sums.num_finished, seconds),
        "finished": sums.num_finished,
        "arrived": sums.num_arrived,
        "out_tokens_per_s": per(sums.num_out_tokens, seconds),
        "in_tokens_per_s": per(sums.num_in_tokens, seconds),
        "prefix_hit_rate": per(sums.num_hit_tokens, sums.num_queried_tokens),
        "preemptions": preempted if steps else None,
        "preemptions_per_min": per(preempted, seconds / 60),
        "recomputed_share": per(sums.num_recomputed_tokens, sums.num_prefill_tokens),
        "recompute_tax": per(sums.recompute_ns, sums.busy_ns),
        "evictions": sums.num_evicted if steps else None,
        "waiting": per(sums.num_waiting, steps),
        "kv_used": per(sums.num_kv_used, sums.num_kv_blocks),
        "kv_peak": sums.kv_peak,
        "budget_used": per(sums.num_spent_tokens, sums.num_budget_tokens),
        "mixed_steps": per(sums.num_mixed, steps),
        **_limits(sums),
        "busy": per(sums.busy_ns, seconds * 1e9),
        "steps_per_s": per(steps, seconds),
        "steps": steps,
        "seconds": seconds,
    }


def _limits(sums: Sums) -> dict[str, float | None]:
    """Return the share of steps held back by each limit, among the steps whose limit is known."""
    known = sum(sums.num_limited)
    return {
        f"limit_{limit}": per(number, known)
        for limit, number in zip(LIMITS, sums.num_limited, strict=True)
    }


def per(part: float | None, whole: float | None) -> float | None:
    """Return `part / whole`; None if one of them is unknown or `whole` is 0."""
    return None if part is None or not whole else part / whole
