"""`ComparedFigure`: one figure of two runs, and which of them is better in it."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.estimate import Estimate, differ, ratio
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.figures.table import FIGURES, Better, FigureUnit
from stepscope.recordings.state.series.latency import LatencyKind

ALIKE = 0.02  # relative; a smaller difference does not matter
ALMOST = 0.05  # a difference that may be chance is "alike" if smaller, "unclear" if larger
_ALIKE_SHARE = 0.002  # absolute, for shares: 99.9 % and 99.8 % are alike

# The better side; `alike`; `unclear`: a difference that may be chance; `differs`: a difference
# without a winner; `unknown`: no value on one side.
Verdict: TypeAlias = Literal["a", "b", "alike", "unclear", "differs", "unknown"]

_COMPARED = (  # compared besides latencies, in this order
    "goodput",
    "goodput_per_s",
    "out_tokens_per_s",
    "in_tokens_per_s",
    "steps_per_s",
    "busy",
    "mixed_steps",
    "budget_used",
    "waiting",
    "limit_budget",
    "limit_seats",
    "limit_kv",
    "limit_mode",
    "limit_threshold",
    "limit_paused",
    "kv_used",
    "kv_peak",
    "prefix_hit_rate",
    "preemptions_per_min",
    "recomputed_share",
    "recompute_tax",
)

_RATIOS = {  # what is summed up over time, and by what it is divided
    "prefix_hit_rate": ("num_hit_tokens", "num_queried_tokens"),
    "goodput": ("num_kept", "num_judged"),
    "goodput_per_s": ("num_kept", "seconds"),
    "out_tokens_per_s": ("num_output_tokens", "seconds"),
    "in_tokens_per_s": ("num_in_tokens", "seconds"),
}


class ComparedFigure(NamedTuple):
    """One figure of two runs. A is the baseline, and B is compared with it.

    Attributes:
        key: name of the figure for programs.
        kind, rank: `kind` is set for latencies, `rank` for their percentiles.
        a, b: values in `unit`; None if unknown, or if nothing was measured.
        better: whether lower or higher is better; None if neither is.
        num_a, num_b: number of samples; 0 for a figure without samples.
        interval: confidence interval of B / A at `estimate.CONFIDENCE`; 0 to infinity if the data
            tells nothing. None if unknown.
        like: the kind of work, if the figure compares only waits with like work (`latencies.py`).
        covered: if `like` is set: the share of waits that have like work in the other run.
    """

    key: str
    label: str
    unit: FigureUnit
    a: float | None
    b: float | None
    better: Better | None
    verdict: Verdict
    num_a: int = 0
    num_b: int = 0
    kind: LatencyKind | None = None
    rank: int | None = None
    interval: tuple[float, float] | None = None
    like: str | None = None
    covered: float | None = None

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
        low, high = (0.0, math.inf) if self.interval is None else self.interval
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


def total_figures(
    a: Side, b: Side, *, is_same_offer: bool, is_one_session: bool
) -> Iterator[ComparedFigure]:
    """Figures from totals: throughput, composition of steps, memory, and wasted work.

    Args:
        is_same_offer: whether both runs had the same load. Otherwise none of these figures has a
            winner, because a larger load alone gives more throughput and a fuller cache.
        is_one_session: whether both runs are parts of one session. Then throughput has no winner,
            because the second part begins with the unfinished requests of the first.
    """
    for figure in _totals(a, b, has_winner=is_same_offer and not is_one_session):
        yield figure if is_same_offer else figure._replace(verdict=without_winner(figure.verdict))


def _totals(a: Side, b: Side, *, has_winner: bool) -> Iterator[ComparedFigure]:
    """Compare the figures listed in `_COMPARED`.

    Args:
        has_winner: whether one of the runs can be better in throughput.
    """
    figures_a, figures_b = a.figures(), b.figures()
    for name in _COMPARED:
        better = FIGURES[name].better
        if name in ("in_tokens_per_s", "out_tokens_per_s") and not has_winner:
            better = None
        if name == "waiting":  # the comparison of loads covers it
            better = None
        value_a, value_b = figures_a[name], figures_b[name]
        is_sure = better is not None and differ(_estimate(name, a), _estimate(name, b))
        yield _figure(name, value_a, value_b, better, is_sure)


def _estimate(name: str, side: Side) -> Estimate | None:
    """An estimate of how much a figure varies within a run; None if the run is too short."""
    parts, wholes = _RATIOS.get(name, ("num_preempted", "seconds"))
    return ratio(*side.totals.over_time(parts, wholes))


def _figure(
    name: str, a: float | None, b: float | None, better: Better | None, is_sure: bool
) -> ComparedFigure:
    spec = FIGURES[name]
    # Only shares with a better direction are also compared by the missing part to 100 %.
    is_share = spec.unit == "share" and better is not None
    verdict = judged(a, b, better, is_sure, is_share=is_share)
    return ComparedFigure(name, spec.label, spec.unit, a, b, better, verdict)


def judged(
    a: float | None,
    b: float | None,
    better: Better | None,
    is_sure: bool,
    *,
    is_share: bool = False,
) -> Verdict:
    """The verdict on two values of a figure.

    Args:
        is_sure: whether the difference is larger than chance explains.
    """
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
