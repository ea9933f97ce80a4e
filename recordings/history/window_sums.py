"""Computes `Sums` (the inputs of all figures) over a window of a timeline."""

from bisect import bisect_right

from stepscope.recordings.figures.sums import LatencySpread, Sums
from stepscope.recordings.figures.table import KINDS, RANKS
from stepscope.recordings.state.series.columns import StepColumns
from stepscope.recordings.state.series.finished import KeptLevels
from stepscope.recordings.state.series.latency import Latencies
from stepscope.recordings.state.series.latency_samples import Samples

_RANKS = tuple(rank for rank in RANKS if rank < 100)


def step_sums(columns: StepColumns, start_ns: int, end_ns: int) -> Sums:
    """Sums over the steps that ended in (start_ns, end_ns], without latencies."""
    first = bisect_right(columns.tokens_ns, start_ns)
    last = bisect_right(columns.tokens_ns, end_ns)
    has_steps = first < last

    def total(name: str) -> int | None:
        return columns.total(name, first, last) if has_steps else None

    def known(name: str) -> int:
        return columns.known_total(name, first, last) if has_steps else 0

    prefill = known("num_prefill_tokens")
    begin_ns, tokens_ns = total("schedule_start_ns"), total("tokens_ns")
    kv = [total(name) for name in ("kv_used", "kv_cached", "kv_empty")]
    has_kv = has_steps and None not in kv
    num_blocks = sum(each or 0 for each in kv) if has_kv else None
    return Sums(
        seconds=seconds_of(columns, start_ns, end_ns),
        num_steps=last - first,
        latencies=dict.fromkeys(KINDS, LatencySpread()),
        kept=KeptLevels(0, 0),
        num_finished=total("num_finished"),
        num_arrived=total("num_arrived"),
        num_in_tokens=columns.num_in_tokens(first, last) if has_steps else None,
        num_out_tokens=total("num_output_tokens"),
        num_queried_tokens=total("num_queried_tokens"),
        num_hit_tokens=total("num_hit_tokens"),
        num_preempted=total("num_preempted"),
        num_prefill_tokens=prefill,
        num_recomputed_tokens=total("num_recomputed_tokens"),
        recompute_ns=columns.recompute_ns(first, last) if has_steps else None,
        num_evicted=total("num_evicted"),
        num_waiting=total("num_waiting") or 0,
        num_kv_used=kv[0],
        num_kv_blocks=num_blocks,
        kv_peak=_kv_peak(columns, first, last) if has_kv else None,
        num_budget_tokens=total("token_budget"),
        num_spent_tokens=prefill + known("num_decode_tokens") + known("num_padded_tokens"),
        num_mixed=columns.num_mixed(first, last) if has_steps else 0,
        num_limited=columns.limits(first, last),
        busy_ns=None if begin_ns is None or tokens_ns is None else tokens_ns - begin_ns,
    )


def seconds_of(columns: StepColumns, start_ns: int, end_ns: int) -> float:
    """Seconds of a window that are in memory; 0 if it has no step."""
    first = bisect_right(columns.tokens_ns, start_ns)
    if first >= bisect_right(columns.tokens_ns, end_ns):
        return 0.0
    # The oldest step in memory counts as a whole, and no time before it.
    since_ns = start_ns if first else columns.column("schedule_start_ns")[0]
    return (end_ns - since_ns) / 1e9


def with_latencies(sums: Sums, latencies: Latencies) -> Sums:
    """Return `sums` with latencies, and with how many requests met the levels. Takes about 1 ms."""
    slo = latencies.slo
    levels = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}
    spreads = {kind: _spread(latencies.of(kind), levels.get(kind)) for kind in KINDS}
    kept = latencies.finished.kept(slo.ttft_ms, slo.itl_ms)
    return sums._replace(latencies=spreads, kept=kept)


def _spread(samples: Samples, level_ms: float | None) -> LatencySpread:
    ranked = samples.ranked()
    if ranked is None:
        return LatencySpread()
    at_ns = dict(zip(_RANKS, ranked.percentiles(_RANKS), strict=True))
    at_ns[100] = ranked.largest
    within = None if level_ms is None else ranked.num_up_to(level_ms * 1e6) / ranked.count
    return LatencySpread(ranked.count, at_ns, within)


def _kv_peak(columns: StepColumns, first: int, last: int) -> float | None:
    """The largest share of KV blocks in use after any of the steps."""
    most = max(columns.column("kv_used")[first:last])
    kv = [columns.column(name)[last - 1] for name in ("kv_used", "kv_cached", "kv_empty")]
    return most / sum(kv) if sum(kv) else None
