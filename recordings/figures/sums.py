"""`figures_of`: the values of all figures, from the sums over a session or a part of it."""

from collections.abc import Mapping

from stepscope.recordings.figures.table import FIGURES, KINDS, RANKS, latency_name
from stepscope.recordings.session.sums import Sums, per, plus
from stepscope.recordings.state.distribution import LatencySpread
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.latency_samples import KeptLevels
from stepscope.recordings.state.limits import LIMITS

Figures = Mapping[str, float | None]  # by name, each in its unit of the table; None is unknown


def figures_of(
    sums: Sums, spreads: Mapping[LatencyKind, LatencySpread], kept: KeptLevels
) -> dict[str, float | None]:
    """Return name -> value of each figure in `FIGURES`; None if unknown or without samples.

    `kept`: of the requests that finished in the steps, how many kept their levels.
    """
    if not sums.num_records:
        return dict.fromkeys(FIGURES) | {"steps": 0, "seconds": 0.0}
    found: dict[str, float | None] = {}
    for kind in KINDS:
        spread = spreads[kind]
        for rank in RANKS:
            ns = spread.at(rank)
            found[latency_name(kind, rank)] = None if ns is None else ns / 1e6
    seconds, known = sums.seconds, sums.num_known_limits
    queried, hit = sums.num_queried_tokens, sums.num_hit_tokens
    new, diverged, evicted = sums.num_new_tokens, sums.num_diverged_tokens, sums.num_evicted_tokens
    # Requests of which none could be judged may have kept their levels.
    has_kept = kept.num_judged > 0 or sums.num_finished == 0
    return found | {
        "ttft_within_slo": spreads["ttft"].within_slo,
        "itl_within_slo": spreads["itl"].within_slo,
        "goodput": per(kept.num_kept, kept.num_judged),
        "goodput_per_s": per(kept.num_kept, seconds) if has_kept else None,
        "finished_per_s": per(sums.num_finished, seconds),
        "finished": sums.num_finished,
        "arrived": sums.num_arrived,
        "out_tokens_per_s": per(sums.num_output_tokens, seconds),
        "in_tokens_per_s": per(sums.num_in_tokens, seconds),
        "prefix_hit_rate": per(hit, queried),
        "prefix_new": per(new, queried),
        "prefix_diverged": per(diverged, queried),
        "prefix_evicted": per(evicted, queried),
        "prefix_hit_rate_1_5x": per(plus(hit, sums.num_more_hits_1_5x), queried),
        "prefix_hit_rate_2x": per(plus(hit, sums.num_more_hits_2x), queried),
        "prefix_thrash": per(sums.num_more_hits_2x, plus(new, diverged, evicted)),
        "preemptions": sums.num_preempted,
        "preemptions_per_min": per(sums.num_preempted, seconds / 60),
        "recomputed_share": per(sums.num_recomputed_tokens, sums.num_prefill_tokens),
        "recompute_tax": per(sums.recompute_ns, sums.busy_ns),
        "evictions": sums.num_evicted,
        "draft_acceptance": per(sums.num_accepted_tokens, sums.num_drafted_tokens),
        "tokens_per_decode": None
        if sums.num_accepted_tokens is None
        else per((sums.num_decode_rows or 0) + sums.num_accepted_tokens, sums.num_decode_rows),
        "waiting": per(sums.num_waiting, sums.num_records),
        "kv_used": sums.kv_used,
        "kv_peak": sums.kv_peak,
        "budget_used": sums.budget_used,
        "mixed_steps": per(sums.num_mixed, sums.num_steps),
        **{
            f"limit_{limit}": per(number, known)
            for limit, number in zip(LIMITS, sums.num_limited, strict=True)
        },
        "rank_wait": per(sum(sums.rank_waits_ns), sums.ranked_ns),
        "busy": per(sums.busy_ns, seconds * 1e9),
        "device_busy": per(sums.device_ns, seconds * 1e9),
        "steps_per_s": per(sums.num_steps, seconds),
        "steps": sums.num_steps,
        "seconds": seconds,
    }
