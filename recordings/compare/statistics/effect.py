"""How much longer or shorter waits are on one side, and how sure that is. Pure functions.

Requests come at random, and what is near in time is alike, so the unit that counts is a stretch of
the run, not a wait, with what neighbours have in common counted in (Newey and West, Econometrica
1987). An interval holds all factors by which the waits of A could be multiplied
without the test telling them from those of B: it excludes 1 where, and only where, the test does.

Each answer is wrong in 1 of 100 cases: a comparison gives a dozen of them, and is to name nothing
in 19 of 20 pairs of runs that are the same (measured by `tests/bench/bench_compare_chance.py`). A
machine whose own speed drifts by some percent for seconds at a time makes that about 11 of 12: what
lasts longer than a stretch no run can tell from a difference.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from stepscope.recordings.compare.side.slices import Slice, Stratum, bin_of, start_of
from stepscope.recordings.compare.statistics.chance import MIN_SLICES
from stepscope.recordings.compare.statistics.stratified import (
    StratifiedWaits,
    StratumShare,
    num_in_strata,
    overlap_weights,
    spread_strata,
)

CONFIDENCE = 0.99
MIN_COVERED = 0.25  # of the waits of each side, where only those with their like are compared
# Two-sided 1 % points of Student's t for fewer degrees of freedom than the key; never too small.
_T_POINTS = {5: 4.61, 6: 4.04, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25, 12: 3.17, 14: 3.06, 17: 2.98,
             20: 2.90, 30: 2.85, 60: 2.76}  # fmt: skip
_MOST = 100.0  # no factor beyond it is looked at
_FINE = 1.01

_Test: TypeAlias = Callable[[float], bool]


class Effect(NamedTuple):
    """A percentile of the waits of both sides.

    Attributes:
        a_ns, b_ns: exact to about 1 %; where waits are in strata, over the same mixture of them.
        low, high: B / A lies between them; infinite where nothing can be said.
        is_sure: that B differs from A.
    """

    a_ns: float
    b_ns: float
    low: float
    high: float
    is_sure: bool


class Contrast:
    """The waits of two runs held against each other.

    Args:
        a, b: the waits of each stretch of both.
        is_paired: the same came in the same stretch of both, so that what it makes of the waits
            falls out of their difference.

    Attributes:
        covered: share of the waits of each side, at least, that are held against each other: those
            in strata that come in several stretches of both. Where these are too few, all strata of
            both are looked at, and nothing of it is sure.
    """

    def __init__(self, a: Sequence[Slice], b: Sequence[Slice], *, is_paired: bool = False) -> None:
        counts = num_in_strata(a), num_in_strata(b)
        strata = spread_strata(a) & spread_strata(b)
        told = [{key: count[key] for key in count if key in strata} for count in counts]
        can_tell = _covered(told, counts) >= MIN_COVERED
        shares = overlap_weights(*(told if can_tell else counts))
        self.covered = _covered([{key: count[key] for key in shares} for count in counts], counts)
        self._a, self._b = (
            StratifiedWaits(slices, count, shares)
            for slices, count in zip((a, b), counts, strict=True)
        )
        self._has_any = bool(shares)
        self._differ = _differ_in_pairs if is_paired else _differ
        if not can_tell or min(self._a.num_stretches, self._b.num_stretches) < MIN_SLICES:
            self._differ = _cannot_tell

    def percentile(self, rank: int) -> Effect | None:
        """None where no stratum has waits on both sides."""
        if not self._has_any:
            return None
        bin_a, bin_b = self._a.percentile(rank), self._b.percentile(rank)
        a_ns, b_ns = _middle(bin_a), _middle(bin_b)

        def differ(factor: float) -> bool:
            """Whether the waits of A, so many times as long, can be told from those of B."""
            apart = math.sqrt(b_ns / (a_ns * factor))
            return self._told_apart(bin_of(round(a_ns * apart)), bin_of(round(b_ns / apart)))

        ratio = b_ns / a_ns
        is_sure = bin_a != bin_b and differ(1.0)
        low = _edge(differ, ratio, 1.0 if not is_sure else None, -1)
        high = _edge(differ, ratio, 1.0 if not is_sure else None, 1)
        if is_sure and ratio < 1 <= high:
            high = _between(differ, ratio, 1.0)
        elif is_sure and low <= 1 < ratio:
            low = _between(differ, ratio, 1.0)
        return Effect(a_ns, b_ns, low, high, is_sure)

    def shares_above_differ(self, bound_ns: float) -> bool:
        """Whether other shares of the waits are longer than a bound."""
        at = bin_of(round(bound_ns))
        return self._has_any and self._told_apart(at, at)

    def _told_apart(self, at_a: int, at_b: int) -> bool:
        """Whether other shares of the waits lie above these bins."""
        return self._differ(self._a.above(at_a), self._b.above(at_b))


def _covered(
    some: Sequence[Mapping[Stratum, int]], counts: Sequence[Mapping[Stratum, int]]
) -> float:
    """Share of the waits of each side, at least, that are in these strata of both."""
    whole = [max(1, sum(count.values())) for count in counts]
    left, right = some
    return sum(min(left[key] / whole[0], right[key] / whole[1]) for key in left if key in right)


def _differ(a: StratumShare, b: StratumShare) -> bool:
    """Welch's t-test (Biometrika 1947)."""
    if a.share == b.share:
        return False
    variance_a, variance_b = _variance(a.apart), _variance(b.apart)
    variance = variance_a + variance_b
    if variance == 0:
        return True
    freedom = variance**2 / (variance_a**2 / a.freedom + variance_b**2 / b.freedom)
    return abs(a.share - b.share) / math.sqrt(variance) > _t_point(freedom)


def _differ_in_pairs(a: StratumShare, b: StratumShare) -> bool:
    """Student's test of the differences, stretch by stretch; Welch's where they do not pair."""
    if len(a.apart) != len(b.apart):
        return _differ(a, b)
    if a.share == b.share:
        return False
    variance = _variance([x - y for x, y in zip(a.apart, b.apart, strict=True)])
    if variance == 0:
        return True
    return abs(a.share - b.share) / math.sqrt(variance) > _t_point(min(a.freedom, b.freedom))


def _cannot_tell(a: StratumShare, b: StratumShare) -> bool:
    """Of runs that are too short."""
    return False


def _variance(apart: Sequence[float]) -> float:
    """Of a share that each stretch was left out of in turn, with what neighbours have in common."""
    variance = sum(x * x for x in apart)
    variance += 2 * max(0.0, sum(x * y for x, y in pairwise(apart)))
    return variance * (len(apart) - 1) / max(1, len(apart))


def _t_point(freedom: float) -> float:
    return next((t for below, t in _T_POINTS.items() if freedom < below), 2.67)


def _middle(at: int) -> float:
    return max(1.0, (start_of(at) + start_of(at + 1)) / 2)


def _edge(differ: _Test, ratio: float, within: float | None, direction: int) -> float:
    """Where the test begins to tell, from the estimate downwards (-1) or upwards (1)."""
    known = ratio
    if within is not None:
        known = min(ratio, within) if direction < 0 else max(ratio, within)
    step = 1.02
    while 1 / _MOST < (tried := known * step**direction) < _MOST:
        if differ(tried):
            return _between(differ, known, tried)
        known, step = tried, step * step
    return 0.0 if direction < 0 else math.inf


def _between(differ: _Test, same: float, other: float) -> float:
    """The border between a factor that cannot be told and one that can."""
    while max(same / other, other / same) > _FINE:
        middle = math.sqrt(same * other)
        if differ(middle):
            other = middle
        else:
            same = middle
    return same
