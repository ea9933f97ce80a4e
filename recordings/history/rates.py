"""`Rates`: throughput, hit rate and time shares, computed from the columns of steps."""

from typing import NamedTuple

from stepscope.recordings.session.sums import Sums, per
from stepscope.recordings.state.session import SessionState

MINUTE_S = 60.0


class Rates(NamedTuple):
    """Rates over a window of engine time. None if unknown, or if the divisor is 0."""

    seconds: float
    num_steps: int
    steps_per_s: float | None
    in_tokens_per_s: float | None  # of prompts, not recomputed ones
    output_tokens_per_s: float | None
    num_preempted: int | None  # over the last minute, whatever the window
    preempted_s: float  # how many seconds of that minute are in memory
    recompute_tax: float | None  # share of that minute's step time for recomputed tokens
    evictions_per_s: float | None
    prefix_hit_rate: float | None  # hit / looked-up prompt tokens
    mixed_share: float | None  # share of steps with both prefill and decode
    model_share: float | None  # share of wall time: running the model
    device_share: float | None  # share of wall time: a device runs it; the rest is the host's
    schedule_share: float | None  # share of wall time: scheduling
    idle_share: float | None  # share of wall time: between steps
    budget_share: float | None  # spent share of all token budgets, padding included
    rank_wait: float | None  # share of the time in steps that the ranks waited for one
    rank_waits_ns: tuple[int, ...]  # how long they waited for each


def rates_of(sums: Sums, minute: Sums, minute_s: float, state: SessionState) -> Rates:
    """The rates over a window. Preemptions are a count: one must never show as several a minute.

    `minute`: the sums over the last minute up to the end of the window.
    """
    seconds, num_in = max(0.0, sums.seconds), sums.num_in_tokens
    if num_in is None and not state.is_summed_up:
        num_in = sums.num_prefill_tokens
    busy = per(sums.busy_ns, seconds * 1e9)
    return Rates(
        seconds=seconds,
        num_steps=sums.num_records,
        steps_per_s=per(sums.num_steps, seconds),
        in_tokens_per_s=per(num_in, seconds),
        output_tokens_per_s=per(sums.num_out_tokens, seconds),
        num_preempted=minute.num_preempted if minute_s else None,
        preempted_s=minute_s,
        recompute_tax=per(minute.recompute_ns, minute.busy_ns),
        evictions_per_s=per(sums.num_evicted, seconds),
        prefix_hit_rate=per(sums.num_hit_tokens, sums.num_queried_tokens),
        mixed_share=per(sums.num_mixed, sums.num_steps),
        model_share=_share(sums.model_ns, seconds),
        device_share=_share(sums.device_ns, seconds),
        schedule_share=_share(sums.schedule_ns, seconds),
        idle_share=None if busy is None else max(0.0, 1.0 - busy),
        budget_share=sums.budget_used,
        rank_wait=per(sum(sums.rank_waits_ns), sums.ranked_ns),
        rank_waits_ns=sums.rank_waits_ns,
    )


def _share(spent_ns: int | None, seconds: float) -> float | None:
    share = per(spent_ns, seconds * 1e9)
    return None if share is None else min(1.0, share)
