"""`Figure`: one thing measured of two runs, and which of them is better in it."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.compare.statistics.estimate import Estimate, differ, ratio
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.figures.table import FIGURES, Better, FigureUnit
from stepscope.recordings.state.series.latency import LatencyKind

ALIKE = 0.02  # a smaller difference does not matter
ALMOST = 0.05  # a smaller one that may be chance is called alike, a larger one unclear
_ALIKE_SHARE = 0.002  # the same for shares, as a difference: 99.9 % and 99.8 %

# Who is better; `alike`; a difference that may be chance; a difference that is neither good nor
# bad; a value that is unknown on one side.
Verdict: TypeAlias = Literal["a", "b", "alike", "unclear", "differs", "unknown"]

_COMPARED = (  # beside latencies, in this order
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


class Figure(NamedTuple):
    """One figure of both sides. A is the starting point, and B is compared with it.

    Attributes:
        key: its name for programs; `kind` is set for latencies, `rank` for their percentiles.
        a, b: in `unit`; None: unknown, or nothing was measured.
        better: which direction is better; None: neither.
        num_a, num_b: number of samples; 0 for a figure without samples.
        interval: of B / A, with `estimate.CONFIDENCE`; 0 to infinity if nothing can be said. None
            if unknown.
        like: the kind of work, for a figure of like work only; `covered` is the share of waits
            that have like work on the other side.
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
        """B / A; None where a ratio is meaningless."""
        if self.a is None or self.b is None or self.a <= 0:
            return None
        return self.b / self.a

    @property
    def factor(self) -> float | None:
        """The larger one divided by the smaller; None if one of them is zero."""
        ratio = self.ratio
        return max(ratio, 1 / ratio) if ratio else None

    @property
    def least_factor(self) -> float | None:
        """The larger one is at least this many times the smaller; None if that is not certain."""
        low, high = (0.0, math.inf) if self.interval is None else self.interval
        if low > 1:
            return low
        return 1 / high if 0 < high < 1 else None

    @property
    def weight(self) -> float:
        """How much the sides differ: 0 not at all."""
        factor = self.factor
        if factor is not None:
            return math.log(factor)
        return 0.0 if self.a == self.b else math.inf


def without_winner(verdict: Verdict) -> Verdict:
    return "differs" if verdict in ("a", "b") else verdict


def total_figures(
    a: Side, b: Side, *, is_same_offer: bool, is_one_session: bool
) -> Iterator[Figure]:
    """Throughput, composition of steps, memory, and wasted work.

    Args:
        is_same_offer: both had the same load. A larger load alone gives more throughput and a
            fuller cache.
        is_one_session: the second part begins with what the first left unfinished.
    """
    for figure in _totals(a, b, has_winner=is_same_offer and not is_one_session):
        yield figure if is_same_offer else figure._replace(verdict=without_winner(figure.verdict))


def _totals(a: Side, b: Side, *, has_winner: bool) -> Iterator[Figure]:
    """Args:
    has_winner: whether throughput has one.
    """
    figures_a, figures_b = figures_of(a.sums()), figures_of(b.sums())
    for name in _COMPARED:
        better = FIGURES[name].better
        if name in ("in_tokens_per_s", "out_tokens_per_s") and not has_winner:
            better = None
        if name == "waiting":  # the load of both says what there is to say of it
            better = None
        value_a, value_b = figures_a[name], figures_b[name]
        is_sure = better is not None and differ(_estimate(name, a), _estimate(name, b))
        yield _figure(name, value_a, value_b, better, is_sure)


def _estimate(name: str, side: Side) -> Estimate | None:
    """How much a figure varies within a run."""
    totals = side.totals
    if name == "prefix_hit_rate":
        return ratio(totals.hits.slices(), totals.queried.slices())
    if name == "goodput":
        kept, late = totals.kept.slices(), totals.late.slices()
        return ratio(kept, [x + y for x, y in zip(kept, late, strict=True)])
    counts = {
        "out_tokens_per_s": totals.tokens_out,
        "in_tokens_per_s": totals.tokens_in,
        "goodput_per_s": totals.kept,
    }
    slices = counts.get(name, totals.preempted).slices()
    return ratio(slices, [1.0] * len(slices))


def _figure(
    name: str, a: float | None, b: float | None, better: Better | None, is_sure: bool
) -> Figure:
    spec = FIGURES[name]
    # What is neither good nor bad has no share that is missing.
    is_share = spec.unit == "share" and better is not None
    verdict = judged(a, b, better, is_sure, is_share=is_share)
    return Figure(name, spec.label, spec.unit, a, b, better, verdict)


def judged(
    a: float | None,
    b: float | None,
    better: Better | None,
    is_sure: bool,
    *,
    is_share: bool = False,
) -> Verdict:
    """Args: is_sure: the difference is hardly chance."""
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
        # 99 % and 97 % look alike as a ratio, and are three times as many that were late.
        missing_a, missing_b = 1 - a, 1 - b
        return abs(a - b) <= share * min(max(a, b), max(missing_a, missing_b))
    return abs(a - b) <= share * max(abs(a), abs(b)) or (is_share and abs(a - b) <= _ALIKE_SHARE)
