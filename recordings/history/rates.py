"""`Rates`: throughput, hit rate and time shares, computed from the columns of steps."""

from bisect import bisect_right
from typing import NamedTuple

from stepscope.engine.protocol.wire import Totals
from stepscope.recordings.figures.sums import per
from stepscope.recordings.state.series.columns import StepColumns
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
    schedule_share: float | None  # share of wall time: scheduling
    idle_share: float | None  # share of wall time: between steps
    budget_share: float | None  # spent share of all token budgets, padding included


def rates_of(columns: StepColumns, start_ns: int, end_ns: int) -> Rates:
    """The rates over the steps that ended in (start_ns, end_ns]."""
    first = bisect_right(columns.tokens_ns, start_ns)
    last = bisect_right(columns.tokens_ns, end_ns)
    preempted = _preempted(columns, end_ns)
    # The window cannot begin before the first step in memory.
    seconds = 0.0
    if first < last:
        seconds = (end_ns - max(start_ns, columns.column("schedule_start_ns")[0])) / 1e9
    if seconds <= 0:
        return Rates(0.0, last - first, *(None,) * 3, *preempted, *(None,) * 7)
    queried = columns.total("num_queried_tokens", first, last)
    hit = columns.total("num_hit_tokens", first, last)
    num_in = columns.num_in_tokens(first, last)
    if num_in is None:
        num_in = columns.known_total("num_prefill_tokens", first, last)
    busy_ns = _spent(columns, "schedule_start_ns", "tokens_ns", first, last)
    return Rates(
        seconds=seconds,
        num_steps=last - first,
        steps_per_s=per(last - first, seconds),
        in_tokens_per_s=per(num_in, seconds),
        output_tokens_per_s=per(columns.total("num_output_tokens", first, last), seconds),
        num_preempted=preempted[0],
        preempted_s=preempted[1],
        recompute_tax=preempted[2],
        evictions_per_s=per(columns.total("num_evicted", first, last), seconds),
        prefix_hit_rate=None if queried is None else per(hit, queried),
        mixed_share=columns.num_mixed(first, last) / (last - first),
        model_share=_share(_spent(columns, "launch_ns", "tokens_ns", first, last), seconds),
        schedule_share=_share(
            _spent(columns, "schedule_start_ns", "schedule_end_ns", first, last), seconds
        ),
        idle_share=None if busy_ns is None else max(0.0, 1.0 - busy_ns / 1e9 / seconds),
        budget_share=_budget_share(columns, first, last),
    )


def rates_of_totals(rates: Rates, state: SessionState) -> Rates:
    """Set rates that need single steps to None if each record totals a time interval."""
    if not state.is_summed_up:
        return rates
    totals = state.totals or Totals()
    prompts = None if totals.num_prompt_tokens is None else rates.in_tokens_per_s
    return rates._replace(
        steps_per_s=None,
        in_tokens_per_s=prompts,
        mixed_share=None,
        model_share=None,
        schedule_share=None,
        idle_share=None,
    )


def _preempted(columns: StepColumns, end_ns: int) -> tuple[int | None, float, float | None]:
    """Number of preemptions in the last minute, how much of it is in memory, and the recompute tax.

    The recompute tax is the share of step time spent on recomputed tokens. Preemptions are a count
    and not a rate, because one preemption must never show as several per minute.
    """
    if not columns.steps or columns.column("schedule_start_ns")[0] >= end_ns:
        return None, 0.0, None
    start_ns = end_ns - round(MINUTE_S * 1e9)
    first, last = bisect_right(columns.tokens_ns, start_ns), bisect_right(columns.tokens_ns, end_ns)
    seconds = min(MINUTE_S, (end_ns - columns.column("schedule_start_ns")[0]) / 1e9)
    if first == last:
        return 0, seconds, None
    busy_ns = _spent(columns, "schedule_start_ns", "tokens_ns", first, last)
    tax = per(columns.recompute_ns(first, last), busy_ns or 0)
    return columns.total("num_preempted", first, last), seconds, tax


def _budget_share(columns: StepColumns, first: int, last: int) -> float | None:
    budget = columns.total("token_budget", first, last)
    if not budget:
        return None
    names = ("num_prefill_tokens", "num_decode_tokens", "num_padded_tokens")
    # Unpublished padding is unknown and counts as 0.
    spent = sum(columns.known_total(name, first, last) for name in names)
    return spent / budget


def _spent(columns: StepColumns, begin: str, end: str, first: int, last: int) -> int | None:
    begin_ns = columns.total(begin, first, last)
    end_ns = columns.total(end, first, last)
    return None if begin_ns is None or end_ns is None else end_ns - begin_ns


def _share(spent_ns: int | None, seconds: float) -> float | None:
    return None if spent_ns is None or not seconds else min(1.0, spent_ns / 1e9 / seconds)
