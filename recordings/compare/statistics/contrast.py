"""`Contrast`: compares the waits of two runs, percentile by percentile.

Multiply the waits of A by a factor, and test (`estimate.py`) whether they differ from those of B.
The confidence interval of a percentile contains every factor for which the test finds no
difference. So it excludes 1 exactly if the test finds a difference between the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.recordings.compare.side.slices import Slice, Stratum, bin_of, start_of
from stepscope.recordings.compare.statistics.estimate import (
    MIN_STRETCHES,
    Estimate,
    differ,
    differ_in_pairs,
)
from stepscope.recordings.compare.statistics.stratified import (
    StratifiedWaits,
    num_in_strata,
    overlap_weights,
    spread_strata,
)

MIN_COVERED = 0.25  # least share of waits in shared strata, to compare these only
_MOST = 100.0  # the largest factor that is tried
_FINE = 1.01

_Test: TypeAlias = Callable[[float], bool]


class Effect(NamedTuple):
    """One percentile of the waits of both runs, and how surely it differs.

    Attributes:
        a_ns, b_ns: the percentile of each run, exact to about 1 %, over the same mixture of strata.
        low, high: confidence bounds of B / A; 0 and infinity if the data tells nothing.
        is_sure: whether the test finds that B differs from A.
    """

    a_ns: float
    b_ns: float
    low: float
    high: float
    is_sure: bool


class Contrast:
    """Compares the waits of two runs.

    Only strata (kinds of work) that occur in several stretches of both runs are compared. If these
    have too few waits, all shared strata are compared, and no difference is sure.

    Args:
        a, b: the waits of each run, one slice per stretch of the run.
        is_paired: both runs had the same requests in the same stretch, so the effect of the
            requests cancels out in the difference.

    Attributes:
        covered: the share of the waits that is compared: the sum over the compared strata of the
            smaller of their shares in A and in B.
    """

    def __init__(self, a: Sequence[Slice], b: Sequence[Slice], *, is_paired: bool = False) -> None:
        counts = num_in_strata(a), num_in_strata(b)
        strata = spread_strata(a) & spread_strata(b)
        spread = [{key: count[key] for key in count if key in strata} for count in counts]
        is_covered = _covered(spread, counts) >= MIN_COVERED
        shares = overlap_weights(*(spread if is_covered else counts))
        self.covered = _covered([{key: count[key] for key in shares} for count in counts], counts)
        self._a, self._b = (
            StratifiedWaits(slices, count, shares)
            for slices, count in zip((a, b), counts, strict=True)
        )
        self._has_any = bool(shares)
        self._differ = differ_in_pairs if is_paired else differ
        if not is_covered or min(self._a.num_stretches, self._b.num_stretches) < MIN_STRETCHES:
            self._differ = _never

    def percentile(self, rank: int) -> Effect | None:
        """Compare a percentile of both runs; None if no stratum has waits in both."""
        if not self._has_any:
            return None
        bin_a, bin_b = self._a.percentile(rank), self._b.percentile(rank)
        a_ns, b_ns = _middle(bin_a), _middle(bin_b)

        def differs(factor: float) -> bool:
            """Whether the waits of A, multiplied by `factor`, surely differ from the waits of B."""
            apart = math.sqrt(b_ns / (a_ns * factor))
            return self._differs_above(bin_of(round(a_ns * apart)), bin_of(round(b_ns / apart)))

        ratio = b_ns / a_ns
        is_sure = bin_a != bin_b and differs(1.0)
        low = _edge(differs, ratio, 1.0 if not is_sure else None, -1)
        high = _edge(differs, ratio, 1.0 if not is_sure else None, 1)
        if is_sure and ratio < 1 <= high:
            high = _between(differs, ratio, 1.0)
        elif is_sure and low <= 1 < ratio:
            low = _between(differs, ratio, 1.0)
        return Effect(a_ns, b_ns, low, high, is_sure)

    def shares_above_differ(self, bound_ns: float) -> bool:
        """Whether the shares of waits longer than a bound surely differ between the runs."""
        at = bin_of(round(bound_ns))
        return self._has_any and self._differs_above(at, at)

    def _differs_above(self, at_a: int, at_b: int) -> bool:
        """Whether the shares of waits above a bin of A and a bin of B surely differ."""
        return self._differ(self._a.above(at_a), self._b.above(at_b))


def _covered(
    some: Sequence[Mapping[Stratum, int]], counts: Sequence[Mapping[Stratum, int]]
) -> float:
    """The sum over shared strata of the smaller of their shares in A's and in B's waits."""
    whole = [max(1, sum(count.values())) for count in counts]
    left, right = some
    return sum(min(left[key] / whole[0], right[key] / whole[1]) for key in left if key in right)


def _never(a: Estimate, b: Estimate) -> bool:
    """The test for runs that are too short: it never finds a sure difference."""
    return False


def _middle(at: int) -> float:
    return max(1.0, (start_of(at) + start_of(at + 1)) / 2)


def _edge(differ: _Test, ratio: float, within: float | None, direction: int) -> float:
    """The factor below (-1) or above (1) `ratio` from which on the test finds a difference."""
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
    """The border between `same`, where the test finds no difference, and `other`.

    At `other` the test finds a difference. The border is found by bisection.
    """
    while max(same / other, other / same) > _FINE:
        middle = math.sqrt(same * other)
        if differ(middle):
            other = middle
        else:
            same = middle
    return same
