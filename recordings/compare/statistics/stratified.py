"""`StratifiedWaits`: the waits of one run, by stretch of time and stratum (kind of work).

A share of the waits is a ratio of sums over stretches (Cochran, Sampling Techniques, 3rd ed., 6.4).
Each stretch is compared with what the *other* stretches predict. If the prediction included the
stretch itself, a stretch that holds most waits of a stratum would never stand out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from stepscope.recordings.compare.side.slices import Bins, Slice, Stratum
from stepscope.recordings.compare.statistics.estimate import Estimate


class StratifiedWaits:
    """The waits of a run, with a weight for each stratum.

    Args:
        slices: the waits of each stretch.
        counts: number of waits in each stratum.
        shares: weights of the strata to use; their sum is 1.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        counts: Mapping[Stratum, int],
        shares: Mapping[Stratum, float],
    ) -> None:
        self.nums = {key: counts[key] for key in shares}
        self._weights = {key: share / self.nums[key] for key, share in shares.items()}
        self._stretches = [
            {key: _Ordered(each[key]) for key in shares if each.get(key)} for each in slices
        ]
        self.num_stretches = sum(bool(each) for each in self._stretches)
        self._bins: list[int] = []
        self._upto: list[float] = []  # share of the waits up to each of these bins
        self._known: dict[int, Estimate] = {}

    def percentile(self, rank: int) -> int:
        """The histogram bin that contains the nearest-rank percentile."""
        if not self._bins:
            self._merge()
        return self._bins[min(len(self._bins) - 1, bisect_left(self._upto, rank / 100 - 1e-9))]

    def above(self, at: int) -> Estimate:
        """Estimate the weighted share of the waits in bins above `at`."""
        found = self._known.get(at)
        if found is None:
            found = self._known[at] = self._above(at)
        return found

    def _merge(self) -> None:
        whole: dict[int, float] = {}
        for stretch in self._stretches:
            for key, ordered in stretch.items():
                weight = self._weights[key]
                for at, number in ordered.bins.items():
                    whole[at] = whole.get(at, 0.0) + number * weight
        self._bins = sorted(whole)
        self._upto = list(accumulate(whole[at] for at in self._bins))

    def _above(self, at: int) -> Estimate:
        longer = [{key: each.above(at) for key, each in s.items()} for s in self._stretches]
        sums = dict.fromkeys(self.nums, 0)
        for stretch in longer:
            for key, number in stretch.items():
                sums[key] += number
        share = sum(self._weights[key] * number for key, number in sums.items())
        apart = []
        for stretch, ordered in zip(longer, self._stretches, strict=True):
            error = 0.0
            for key, number in stretch.items():
                count = ordered[key].count
                others = max(1, self.nums[key] - count)
                expected = count * (sums[key] - number) / others
                error += self._weights[key] * (number - expected)
            apart.append(error)
        return Estimate(share, apart, max(1, self.num_stretches - 1))


class _Ordered:
    """The waits of one stratum in one stretch, sorted to count quickly how many exceed a bin."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self._order = sorted(bins)
        self._upto = list(accumulate(map(bins.__getitem__, self._order), initial=0))
        self.count = self._upto[-1]

    def above(self, at: int) -> int:
        return self.count - self._upto[bisect_right(self._order, at)]


def num_in_strata(slices: Sequence[Slice]) -> dict[Stratum, int]:
    """Number of waits in each stratum."""
    found: dict[Stratum, int] = {}
    for each in slices:
        for key, bins in each.items():
            found[key] = found.get(key, 0) + sum(bins.values())
    return found


def spread_strata(slices: Sequence[Slice]) -> set[Stratum]:
    """The strata with waits in at least two stretches.

    If a stratum has waits in only one stretch, no other stretch can predict them.
    """
    seen: set[Stratum] = set()
    found: set[Stratum] = set()
    for each in slices:
        for key, bins in each.items():
            if bins:
                (found if key in seen else seen).add(key)
    return found


def overlap_weights(a: Mapping[Stratum, int], b: Mapping[Stratum, int]) -> dict[Stratum, float]:
    """Weights of the strata in which both runs have waits. Their sum is 1.

    A weight grows with the number of waits that both runs have in that stratum, and is the same for
    both runs (overlap weights: Li, Morgan and Zaslavsky, JASA 2018).
    """
    weights = {
        key: number * b[key] / (number + b[key])
        for key, number in a.items()
        if number and b.get(key)
    }
    whole = sum(weights.values())
    return {key: weight / whole for key, weight in weights.items()}
