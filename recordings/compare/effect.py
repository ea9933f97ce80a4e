"""How much longer or shorter waits are on one side, and how sure that is. Pure functions.

Requests come at random, and what is near in time is alike, so the unit that counts is a stretch of
the run, not a wait: a share of the waits is a ratio of sums over stretches (Cochran, Sampling
Techniques, 3rd ed., 6.4), with what neighbours have in common counted in (Newey and West,
Econometrica 1987). An interval holds all factors by which the waits of A could be multiplied
without the test telling them from those of B: it excludes 1 where, and only where, the test does.

Each answer is wrong in 1 of 100 cases: a comparison gives a dozen of them, and is to name nothing
in 19 of 20 pairs of runs that are the same (measured by `tests/bench/bench_compare_chance.py`).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from stepscope.recordings.compare.chance import MIN_SLICES
from stepscope.recordings.compare.slices import Bins, Slice, Stratum, bin_of, start_of

CONFIDENCE = 0.99
NUM_STRETCHES = 10
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
        covered: share of the waits of each side, at least, that were in strata of both.
    """

    a_ns: float
    b_ns: float
    low: float
    high: float
    is_sure: bool
    covered: float


def percentile_effect(
    a: Sequence[Slice], b: Sequence[Slice], rank: int, *, is_paired: bool = False
) -> Effect | None:
    """Waits of each stretch of both runs; None where no stratum has waits on both sides.

    Args:
        is_paired: the same came in the same stretch of both, so that what it makes of the waits
            falls out of their difference.

    Strata count as much as both sides have in common of them (overlap weights: Li, Morgan and
    Zaslavsky, JASA 2018), on either side the same.
    """
    shares = _common(a, b)
    if not shares:
        return None
    left, right = _Run(a, shares), _Run(b, shares)
    low_bin, high_bin = left.percentile(rank), right.percentile(rank)
    a_ns, b_ns = _middle(low_bin), _middle(high_bin)
    covered = sum(
        min(left.nums[key] / max(1, left.num_all), right.nums[key] / max(1, right.num_all))
        for key in shares
    )
    has_enough = min(left.num_stretches, right.num_stretches) >= MIN_SLICES

    def differ(factor: float) -> bool:
        """Whether the waits of A, so many times as long, can be told from those of B."""
        if not has_enough:
            return False
        apart = math.sqrt(b_ns / (a_ns * factor))
        return test(left.above(bin_of(round(a_ns * apart))),
                    right.above(bin_of(round(b_ns / apart))))  # fmt: skip

    test = _differ_in_pairs if is_paired else _differ
    ratio = b_ns / a_ns
    is_sure = low_bin != high_bin and differ(1.0)
    low = _edge(differ, ratio, 1.0 if not is_sure else None, -1)
    high = _edge(differ, ratio, 1.0 if not is_sure else None, 1)
    if is_sure and ratio < 1 <= high:
        high = _between(differ, ratio, 1.0)
    elif is_sure and low <= 1 < ratio:
        low = _between(differ, ratio, 1.0)
    return Effect(a_ns, b_ns, low, high, is_sure, covered)


def shares_above_differ(
    a: Sequence[Slice], b: Sequence[Slice], bound_ns: float, *, is_paired: bool = False
) -> bool:
    """Whether other shares of the waits are longer than a bound; `is_paired` as above."""
    shares = _common(a, b)
    if not shares:
        return False
    left, right = _Run(a, shares), _Run(b, shares)
    if min(left.num_stretches, right.num_stretches) < MIN_SLICES:
        return False
    at = bin_of(round(bound_ns))
    test = _differ_in_pairs if is_paired else _differ
    return test(left.above(at), right.above(at))


class _Estimate(NamedTuple):
    share: float
    variance: float
    freedom: int
    apart: list[float]  # what each stretch adds to the error of the share


class _Run:
    """The waits of a side, in strata that count for `shares`."""

    def __init__(self, slices: Sequence[Slice], shares: dict[Stratum, float]) -> None:
        self.nums = {key: sum(sum(each.get(key, {}).values()) for each in slices) for key in shares}
        self.num_all = sum(sum(bins.values()) for each in slices for bins in each.values())
        self._weights = {key: share / self.nums[key] for key, share in shares.items()}
        self._stretches = [
            {key: _Ordered(each[key]) for key in shares if each.get(key)} for each in slices
        ]
        self.num_stretches = sum(bool(each) for each in self._stretches)

    def percentile(self, rank: int) -> int:
        """The bin that the nearest rank lies in."""
        whole: dict[int, float] = {}
        for stretch in self._stretches:
            for key, ordered in stretch.items():
                for at, number in ordered.items():
                    whole[at] = whole.get(at, 0.0) + number * self._weights[key]
        seen, at = 0.0, 0
        for at in sorted(whole):
            seen += whole[at]
            if seen >= rank / 100 - 1e-9:
                break
        return at

    def above(self, at: int) -> _Estimate:
        """The share of the waits that lie in bins above one."""
        longer = [{key: each.above(at) for key, each in s.items()} for s in self._stretches]
        sums = dict.fromkeys(self.nums, 0)
        for stretch in longer:
            for key, number in stretch.items():
                sums[key] += number
        shares = {key: sums[key] / self.nums[key] for key in sums}
        apart = [
            sum(
                self._weights[key] * (number - shares[key] * ordered[key].count)
                for key, number in stretch.items()
            )
            for stretch, ordered in zip(longer, self._stretches, strict=True)
        ]
        share = sum(self._weights[key] * number for key, number in sums.items())
        return _Estimate(share, _variance(apart), max(1, self.num_stretches - 1), apart)


class _Ordered:
    """How many waits lie above any bin."""

    def __init__(self, bins: Bins) -> None:
        self._bins = sorted(bins)
        self._upto = [0]
        for at in self._bins:
            self._upto.append(self._upto[-1] + bins[at])
        self.count = self._upto[-1]

    def above(self, at: int) -> int:
        return self.count - self._upto[bisect_right(self._bins, at)]

    def items(self) -> Iterator[tuple[int, int]]:
        for place, at in enumerate(self._bins):
            yield at, self._upto[place + 1] - self._upto[place]


def _common(a: Sequence[Slice], b: Sequence[Slice]) -> dict[Stratum, float]:
    """Strata that both sides have waits in, and what each counts for; together 1."""
    counts = []
    for side in (a, b):
        count: dict[Stratum, int] = {}
        for each in side:
            for key, bins in each.items():
                count[key] = count.get(key, 0) + sum(bins.values())
        counts.append(count)
    left, right = counts
    weights = {
        key: left[key] * right[key] / (left[key] + right[key])
        for key in left
        if left[key] and right.get(key)
    }
    whole = sum(weights.values())
    return {key: weight / whole for key, weight in weights.items()}


def _differ(a: _Estimate, b: _Estimate) -> bool:
    """Welch's t-test (Biometrika 1947)."""
    if a.share == b.share:
        return False
    variance = a.variance + b.variance
    if variance == 0:
        return True
    freedom = variance**2 / (a.variance**2 / a.freedom + b.variance**2 / b.freedom)
    return abs(a.share - b.share) / math.sqrt(variance) > _t_point(freedom)


def _differ_in_pairs(a: _Estimate, b: _Estimate) -> bool:
    """Student's test of the differences, stretch by stretch; Welch's where they do not pair."""
    if len(a.apart) != len(b.apart):
        return _differ(a, b)
    if a.share == b.share:
        return False
    variance = _variance([x - y for x, y in zip(a.apart, b.apart, strict=True)])
    if variance == 0:
        return True
    return abs(a.share - b.share) / math.sqrt(variance) > _t_point(min(a.freedom, b.freedom))


def _variance(apart: Sequence[float]) -> float:
    """Of the sum of what stretches add, with what neighbours have in common."""
    num = len(apart)
    variance = sum(x * x for x in apart)
    variance += 2 * max(0.0, sum(x * y for x, y in pairwise(apart)))
    return variance * num / max(1, num - 1)


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
