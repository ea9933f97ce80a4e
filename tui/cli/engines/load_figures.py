"""Computes the figures of a run of `stepscope load`, under the names that all commands use.

The client measures latencies with its own clock, so they include the time that messages take
between client and engine.
"""

import math
from collections.abc import Sequence

from stepscope.engine.workload.load import LoadReport
from stepscope.recordings.figures.table import RANKS, latency_name
from stepscope.recordings.session.sums import per
from stepscope.recordings.state.series.latency import SLO, LatencyKind


def load_figures(report: LoadReport, slo: SLO) -> dict[str, float | None]:
    """Return name -> value of the figures that a client can measure; None without samples."""
    finished = report.finished
    samples: dict[LatencyKind, Sequence[float]] = {
        "ttft": report.ttft_s,
        "itl": report.itl_s,
        "tpot": [each.tpot_s for each in finished if each.tpot_s is not None],
        "e2e": [each.e2e_s for each in finished],
    }
    found: dict[str, float | None] = {}
    for kind, samples_s in samples.items():
        ordered = sorted(samples_s)
        for rank in RANKS:
            value_s = _nearest_rank(ordered, rank)
            found[latency_name(kind, rank)] = None if value_s is None else value_s * 1000
    ttft_s, itl_s, seconds = slo.ttft_ms / 1000, slo.itl_ms / 1000, report.duration_s
    num_kept = sum(each.ttft_s <= ttft_s and each.worst_itl_s <= itl_s for each in finished)
    return found | {
        "ttft_within_slo": _share_within(report.ttft_s, ttft_s),
        "itl_within_slo": _share_within(report.itl_s, itl_s),
        "goodput": per(num_kept, len(finished)),
        "goodput_per_s": per(num_kept, seconds),
        "finished_per_s": per(report.num_finished, seconds),
        "finished": report.num_finished,
        "out_tokens_per_s": per(report.num_output_tokens, seconds),
        "in_tokens_per_s": per(report.num_prompt_tokens, seconds),
        "prefix_hit_rate": per(report.num_cached_tokens, report.num_finished_prompt_tokens),
        "seconds": seconds,
    }


def _nearest_rank(ordered: Sequence[float], rank: int) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, math.ceil(rank * len(ordered) / 100) - 1)]


def _share_within(samples_s: Sequence[float], level_s: float) -> float | None:
    return per(sum(each <= level_s for each in samples_s), len(samples_s))
