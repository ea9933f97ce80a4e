"""`ComparedFigure`: one figure of two runs, and which of them is better in it."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.bootstrap import RatioInterval, draw, percentile_ratio, ratio_of
from stepscope.recordings.compare.load import ALIKE_LOAD, LoadDifference
from stepscope.recordings.compare.side import Side
from stepscope.recordings.figures import FIGURES, KINDS, RANKS, Better, FigureUnit
from stepscope.recordings.session.totals import NUM_SLICES
from stepscope.recordings.session.waits import BESIDE_PREFILL, DECODE_ONLY, Waits, bin_of
from stepscope.recordings.state.limits import LIMITS, NAMED_WAITS

ALIKE = 0.02  # relative; a smaller difference does not matter
ALMOST = 0.05  # a difference that may be chance is "alike" if smaller, "unclear" if larger
_ALIKE_SHARE = 0.002  # absolute, for shares: 99.9 % and 99.8 % are alike

# The better side; `alike`; `unclear`: a difference that may be chance; `differs`: a difference
# without a winner; `unknown`: no value on one side.
Verdict: TypeAlias = Literal["a", "b", "alike", "unclear", "differs", "unknown"]

PARTS = {DECODE_ONLY: "ITL decode only", BESIDE_PREFILL: "ITL beside a prefill"}
COMPARED_KINDS: dict[str, str] = dict([*KINDS.items(), *PARTS.items()])
_PART_RANKS = (50, 99)
_QUEUED = ("ttft", "e2e")  # they include the wait for admission

# Compared besides latencies, in this order. With a better side: what is summed up over time, and by
# what it is divided.
_COMPARED: dict[str, tuple[str, str] | None] = {
    "goodput": ("num_kept", "num_judged"),
    "goodput_per_s": ("num_kept", "seconds"),
    "out_tokens_per_s": ("num_output_tokens", "seconds"),
    "in_tokens_per_s": ("num_in_tokens", "seconds"),
    "steps_per_s": None,
    "busy": None,
    "mixed_steps": None,
    "budget_used": None,
    "waiting": None,  # the comparison of loads covers it
    **dict.fromkeys(f"limit_{limit}" for limit in LIMITS if limit != "work"),
    "draft_acceptance": None,
    "tokens_per_decode": None,
    "kv_used": None,
    "kv_peak": None,
    "prefix_hit_rate": ("num_hit_tokens", "num_queried_tokens"),
    "preemptions_per_min": ("num_preempted", "seconds"),
    "recomputed_share": ("num_recomputed_tokens", "num_prefill_tokens"),
    "recompute_tax": ("num_recomputed_tokens", "num_prefill_tokens"),  # as a share of time
}


_RARE = {"draft_acceptance", "tokens_per_decode", "limit_cadence"}
_RARE |= {f"limit_{limit}" for limit in NAMED_WAITS}


class ComparedFigure(NamedTuple):
    """One figure of two runs. A is the baseline, and B is compared with it."""

    key: str  # name of the figure for programs
    label: str
    unit: FigureUnit
    a: float | None  # in `unit`; None if unknown, or if nothing was measured
    b: float | None
    better: Better | None  # whether lower or higher is better; None if neither is
    verdict: Verdict
    num_a: int = 0  # number of samples; 0 for a figure without samples
    num_b: int = 0
    kind: str | None = None  # of a latency
    rank: int | None = None  # of a percentile
    interval: RatioInterval | None = None  # confidence interval of B / A; None if it is not judged

    @property
    def ratio(self) -> float | None:
        """B / A; None if a value is unknown or A is not positive."""
        if self.a is None or self.b is None or self.a <= 0:
            return None
        return self.b / self.a

    @property
    def factor(self) -> float | None:
        """The larger value divided by the smaller; None without a ratio, or if B is zero."""
        ratio = self.ratio
        return max(ratio, 1 / ratio) if ratio else None

    @property
    def least_factor(self) -> float | None:
        """Lower confidence bound of `factor`; None if the interval includes 1."""
        low, high = self.interval or RatioInterval()
        if low > 1:
            return low
        return 1 / high if 0 < high < 1 else None

    @property
    def weight(self) -> float:
        """How much the two values differ, for sorting; 0 if they are equal."""
        factor = self.factor
        if factor is not None:
            return math.log(factor)
        return 0.0 if self.a == self.b else math.inf


def without_winner(verdict: Verdict) -> Verdict:
    return "differs" if verdict in ("a", "b") else verdict


def compared_figures(
    a: Side, b: Side, load: LoadDifference, *, is_one_session: bool
) -> list[ComparedFigure]:
    """All figures of two runs, latencies first.

    Args:
        load: the difference in load. A run that waits less because it has less load is not better.
        is_one_session: whether both runs are parts of one session. Then throughput has no winner,
            because the second part begins with the unfinished requests of the first.
    """
    seeds = 0, 0 if load.is_same else 1
    has_throughput = load.difference is None and not is_one_session
    return [*_latencies(a, b, load, seeds), *_totals(a, b, load, seeds, has_throughput)]


def _latencies(
    a: Side, b: Side, load: LoadDifference, seeds: tuple[int, int]
) -> Iterator[ComparedFigure]:
    figures_a, figures_b = a.figures(), b.figures()
    slices = [side.slices.waits.grouped(NUM_SLICES) for side in (a, b)]
    levels = {"ttft": a.slo.ttft_ms, "itl": a.slo.itl_ms}
    for kind, label in COMPARED_KINDS.items():
        waits_a, waits_b = (Waits(each, kind) for each in slices)
        if kind.startswith("served") and not waits_a.count and not waits_b.count:
            continue  # no front end told of them
        ranks = _PART_RANKS if kind in PARTS else tuple(RANKS)
        nums = waits_a.count, waits_b.count
        has_queue = kind in _QUEUED and _has_queue(a), kind in _QUEUED and _has_queue(b)
        for rank in ranks:
            key = f"{kind}_{RANKS[rank]}"
            if kind in PARTS:
                value_a, value_b = waits_a.percentile_ms(rank), waits_b.percentile_ms(rank)
            else:
                value_a, value_b = figures_a[key], figures_b[key]
            interval = percentile_ratio(waits_a, waits_b, rank, seeds) if rank < 100 else None
            verdict = judged(value_a, value_b, "lower", interval is None or interval.is_sure)
            # The maximum grows with the length of a run, so it has no winner.
            verdict = without_winner(verdict) if rank == 100 else _under(load, verdict, has_queue)
            yield ComparedFigure(
                key, f"{label} {RANKS[rank]}", "ms", value_a, value_b, "lower", verdict, *nums,
                kind, rank, interval,
            )  # fmt: skip
        key, level_ms = f"{kind}_within_slo", levels.get(kind)
        if level_ms is not None:
            at = bin_of(round(level_ms * 1e6))
            interval = ratio_of(
                draw(waits_a.within(at), waits_a.totals, seeds[0]),
                draw(waits_b.within(at), waits_b.totals, seeds[1]),
            )
            value_a, value_b = figures_a[key], figures_b[key]
            verdict = judged(value_a, value_b, "higher", interval.is_sure, is_share=True)
            yield ComparedFigure(
                key, f"{label} within {level_ms:g} ms", "share", value_a, value_b, "higher",
                _under(load, verdict, has_queue), *nums, kind, interval=interval,
            )  # fmt: skip


def _has_queue(side: Side) -> bool:
    sums = side.sums()
    return (sums.num_waiting or 0) >= sums.num_records > 0


def _under(load: LoadDifference, verdict: Verdict, has_queue: tuple[bool, bool]) -> Verdict:
    """A verdict, without a winner if the difference in load may explain it.

    `has_queue`: of these waits, in A and in B: near capacity a little more load makes it much
    longer.
    """
    if verdict not in ("a", "b") or load.is_same:
        return verdict
    if load.other_work is None and not has_queue[1 if verdict == "a" else 0]:
        return verdict
    # At most by this factor, the better side had less to do.
    excess = load.more_b if verdict == "a" else load.more_a
    return verdict if excess <= 1 + ALIKE_LOAD else without_winner(verdict)


def _totals(
    a: Side, b: Side, load: LoadDifference, seeds: tuple[int, int], has_throughput: bool
) -> Iterator[ComparedFigure]:
    """With another load none of these has a winner: more load alone gives more throughput."""
    figures_a, figures_b = a.figures(), b.figures()
    for name, sums in _COMPARED.items():
        spec, interval = FIGURES[name], None
        better = None if sums is None else spec.better
        if name in ("in_tokens_per_s", "out_tokens_per_s") and not has_throughput:
            better = None
        if sums is not None and better is not None:
            (part_a, whole_a), (part_b, whole_b) = (side.slices.over_time(*sums) for side in (a, b))
            interval = ratio_of(draw(part_a, whole_a, seeds[0]), draw(part_b, whole_b, seeds[1]))
        is_sure = interval is not None and interval.is_sure
        # Only shares with a better direction are also compared by the missing part to 100 %.
        is_share = spec.unit == "share" and better is not None
        values = figures_a[name], figures_b[name]
        if name in _RARE and not any(value and value != 1 for value in values):
            continue  # most engines have none of them
        verdict = judged(*values, better, is_sure, is_share=is_share)
        if load.difference is not None:
            verdict = without_winner(verdict)
        yield ComparedFigure(
            name, spec.label, spec.unit, *values, better, verdict, interval=interval
        )


def judged(
    a: float | None,
    b: float | None,
    better: Better | None,
    is_sure: bool,
    *,
    is_share: bool = False,
) -> Verdict:
    """The verdict on two values; `is_sure`: they differ by more than chance explains."""
    if a is None or b is None:
        return "unknown"
    if a == b or _is_within(a, b, ALIKE, is_share):
        return "alike"
    if better is None:
        return "differs"
    if not is_sure:
        return "alike" if _is_within(a, b, ALMOST, is_share) else "unclear"
    return "a" if (a < b) == (better == "lower") else "b"


def _is_within(a: float, b: float, share: float, is_share: bool) -> bool:
    if is_share and abs(a - b) > _ALIKE_SHARE:
        # 99 % and 97 % are alike as a ratio, but the latter has three times as many late ones.
        missing_a, missing_b = 1 - a, 1 - b
        return abs(a - b) <= share * min(max(a, b), max(missing_a, missing_b))
    return abs(a - b) <= share * max(abs(a), abs(b)) or (is_share and abs(a - b) <= _ALIKE_SHARE)
