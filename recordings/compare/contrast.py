"""`Contrast`: compares the waits of two runs, percentile by percentile.

Multiply the waits of A by a factor, and test (`estimate.py`) whether they differ from those of B.
The confidence interval of a percentile contains every factor for which the test finds no
difference. So it excludes 1 exactly if the test finds a difference between the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from stepscope.recordings.compare.estimate import (
    MIN_STRETCHES,
    Estimate,
    differ,
    differ_in_pairs,
)
from stepscope.recordings.compare.side.slices import Slice, Stratum, bin_of, start_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_COVERED = 0.25  # least share of waits in shared strata, to compare these only
_MOST = 100.0  # the largest factor that is tried
_FINE = 1.01

_Test: TypeAlias = Callable[[float], bool]
_Numbers: TypeAlias = "NDArray[np.float64]"


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
        import numpy as np  # not at the start of the program

        strata = {key: at for at, key in enumerate({key for each in (*a, *b) for key, _ in each})}
        self._a, self._b = (_WeighedWaits(slices, strata, np) for slices in (a, b))
        nums = self._a.nums, self._b.nums
        is_shared = (nums[0] > 0) & (nums[1] > 0)
        # In a stratum with waits in one stretch only, no other stretch can predict them.
        is_spread = is_shared & self._a.is_spread & self._b.is_spread
        common = np.minimum(*(each / max(1, each.sum()) for each in nums))
        is_covered = common[is_spread].sum() >= MIN_COVERED
        is_used = is_spread if is_covered else is_shared
        self.covered = float(common[is_used].sum())
        # Overlap weights: Li, Morgan and Zaslavsky, JASA 2018.
        weights = np.where(is_used, nums[0] * nums[1] / np.maximum(1, nums[0] + nums[1]), 0.0)
        self._has_any = bool(is_used.any())
        for side in (self._a, self._b):
            side.weigh(weights / (weights.sum() or 1.0))
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


class _WeighedWaits:
    """The waits of one run, by stretch of time and stratum (kind of work).

    A share of the waits is a ratio of sums over stretches (Cochran, Sampling Techniques, 3rd ed.,
    6.4). Each stretch is compared with what the *other* stretches predict. If the prediction
    included the stretch itself, a stretch that holds most waits of a stratum would never stand out.

    Attributes:
        nums: number of waits in each stratum.
        is_spread: whether a stratum has waits in at least two stretches.
        num_stretches: stretches with waits that have a weight.
    """

    def __init__(self, slices: Sequence[Slice], strata: Mapping[Stratum, int], np: Any) -> None:
        self._np = np
        bins = [at for each in slices for _, at in each]
        cells = [
            place * len(strata) + strata[key]
            for place, each in enumerate(slices)
            for key, _ in each
        ]
        counts = [number for each in slices for number in each.values()]
        found = np.array([bins, cells, counts], dtype=np.int64)
        self._bins, self._cells, self._counts = found[:, found[0].argsort(kind="stable")]
        self._shape = len(slices), len(strata)
        self._nums = self._sums_from(0)
        self.nums: _Numbers = self._nums.sum(0)
        self.is_spread = (self._nums > 0).sum(0) >= 2
        self._known: dict[int, Estimate] = {}

    def weigh(self, shares: _Numbers) -> None:
        """Set the weight of each stratum; their sum is 1, or 0 if no waits are used."""
        self._weights = shares / self._np.maximum(1, self.nums)
        self.num_stretches = int((self._nums[:, shares > 0].sum(1) > 0).sum())
        weights = self._np.tile(self._weights, self._shape[0])
        self._upto = (weights[self._cells] * self._counts).cumsum()

    def percentile(self, rank: int) -> int:
        """The histogram bin that contains the nearest-rank percentile."""
        place = int(self._upto.searchsorted(rank / 100 - 1e-9))
        return int(self._bins[min(place, len(self._bins) - 1)])

    def above(self, at: int) -> Estimate:
        """Estimate the weighted share of the waits in bins above `at`."""
        found = self._known.get(at)
        if found is None:
            nums, longer = self._nums, self._sums_from(int(self._bins.searchsorted(at, "right")))
            sums = longer.sum(0)
            expected = nums * (sums - longer) / self._np.maximum(1, self.nums - nums)
            apart = ((longer - expected) * self._weights).sum(1)
            share, freedom = float((self._weights * sums).sum()), max(1, self.num_stretches - 1)
            found = self._known[at] = Estimate(share, apart.tolist(), freedom)
        return found

    def _sums_from(self, first: int) -> _Numbers:
        """Number of waits by stretch and stratum, from the entry `first` on."""
        sums: _Numbers = self._np.bincount(
            self._cells[first:], self._counts[first:], minlength=math.prod(self._shape)
        ).reshape(self._shape)
        return sums


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
