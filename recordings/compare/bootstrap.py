"""The one test behind every verdict: a block bootstrap over slices of time.

A run is cut into at most 20 equal slices, and each figure is a ratio of sums over them. Drawing
pairs of neighbouring slices with replacement, again and again, gives other runs that might as well
have been measured (Künsch, Annals of Statistics 1989; in a circle: Politis and Romano 1992). A
difference is sure if nearly all pairs of such runs show it. Slices are drawn, not waits, because
waits close in time are alike: one long prompt delays every decode beside it.

A percentile differs if the share of waits beyond it does. Its own draws would jump between the few
lengths that waits have: a decode alone, and one beside a prefill.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from stepscope.recordings.session.waits import Waits, bin_of, middle_of
from stepscope.recordings.state.lazy_numpy import Floats, np

CONFIDENCE = 0.99  # a comparison tests a dozen figures: of equal runs, few pairs get a winner
MIN_SLICES = 5  # with fewer, no difference is sure
_NUM_DRAWS = 4000
_MOST = 100.0  # the largest factor that is tried
_FINE = 1.01


class RatioInterval(NamedTuple):
    """A confidence interval of B / A; 0 to infinity if the data tells nothing."""

    low: float = 0.0
    high: float = math.inf

    @property
    def is_sure(self) -> bool:
        """Whether it excludes that A and B are equal."""
        return not self.low <= 1 <= self.high


class Resamples(NamedTuple):
    """A figure of each drawn run, NaN without a value, and how many slices it was drawn from."""

    values: Floats
    num_slices: int


def draw(parts: Sequence[float], wholes: Sequence[float], seed: int) -> Resamples:
    """The sum of `parts` divided by the sum of `wholes`, with one of each per slice.

    `seed`: if two runs had the same requests in the same slices, draw the same slices of both. The
    effect of the requests then cancels out.
    """
    if not any(wholes):
        return Resamples(np.full(_NUM_DRAWS, math.nan), 0)
    sums = _times(len(wholes), seed) @ np.array([parts, wholes], dtype=float).T
    with np.errstate(invalid="ignore", divide="ignore"):
        return Resamples(sums[:, 0] / sums[:, 1], int(np.count_nonzero(wholes)))


def ratio_of(a: Resamples, b: Resamples) -> RatioInterval:
    rank = _rank(a, b)
    if rank is None:
        return RatioInterval()
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(a.values == b.values, 1.0, b.values / a.values)
    ratios = ratios[~np.isnan(ratios)]
    ratios.sort()
    return RatioInterval(float(ratios[rank]), float(ratios[-1 - rank]))


def percentile_ratio(a: Waits, b: Waits, rank: int, seeds: tuple[int, int]) -> RatioInterval:
    """The interval of B / A for a percentile: the factors that the test does not rule out.

    It multiplies the waits of A by a factor, and tests whether equal shares of the waits of both
    are longer than the middle of the two percentiles.
    """
    bin_a, bin_b = a.percentile(rank), b.percentile(rank)
    if bin_a is None or bin_b is None:
        return RatioInterval()
    a_ns, b_ns = middle_of(bin_a), middle_of(bin_b)

    def differs(factor: float) -> bool:
        middle_ns = math.sqrt(a_ns * factor * b_ns)
        within_a = a.within(bin_of(round(middle_ns / factor)))
        return _differ(
            draw(within_a, a.totals, seeds[0]),
            draw(b.within(bin_of(round(middle_ns))), b.totals, seeds[1]),
        )

    ratio = b_ns / a_ns
    is_sure = bin_a != bin_b and differs(1.0)
    low, high = (_edge(differs, ratio, is_sure, direction) for direction in (-1, 1))
    return RatioInterval(low, high)


def _differ(a: Resamples, b: Resamples) -> bool:
    rank, apart = _rank(a, b), b.values - a.values
    return rank is not None and min((~(apart > 0)).sum(), (~(apart < 0)).sum()) <= rank


def _rank(a: Resamples, b: Resamples) -> int | None:
    """How many draws lie beyond each end of an interval; None with too few slices.

    As many as make it as wide as few blocks need: Hesterberg, What teachers should know about the
    bootstrap (The American Statistician 2015).
    """
    num_slices = min(a.num_slices, b.num_slices)
    if num_slices < MIN_SLICES:
        return None
    number = -(-num_slices // 2)  # of blocks
    z, freedom = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), number - 1
    # Student's t instead of z: Abramowitz and Stegun, 26.7.5.
    t = z + (z**3 + z) / 4 / freedom + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2
    return int(NormalDist().cdf(-t * math.sqrt(number / freedom)) * _NUM_DRAWS)


@lru_cache(maxsize=16)
def _times(num_slices: int, seed: int) -> Floats:
    """How often each slice was drawn, in each drawn run: always with the one after it."""
    num_blocks, shares = -(-num_slices // 2), np.full(num_slices, 1 / num_slices)
    firsts = np.random.default_rng(seed).multinomial(num_blocks, shares, _NUM_DRAWS)
    drawn: Floats = (firsts + np.roll(firsts, 1, axis=1)).astype(float)
    return drawn


def _edge(differs: Callable[[float], bool], ratio: float, is_sure: bool, direction: int) -> float:
    """The factor below (-1) or above (1) `ratio` from which on the test finds a difference."""
    is_between = ratio * direction < direction  # whether 1 lies in this direction
    if is_sure and is_between:
        return _border(differs, ratio, 1.0)
    known = 1.0 if is_between else ratio
    step = 1.02
    while 1 / _MOST < (tried := known * step**direction) < _MOST:
        if differs(tried):
            return _border(differs, known, tried)
        known, step = tried, step * step
    return 0.0 if direction < 0 else math.inf


def _border(differs: Callable[[float], bool], same: float, other: float) -> float:
    while max(same / other, other / same) > _FINE:
        middle = math.sqrt(same * other)
        if differs(middle):
            other = middle
        else:
            same = middle
    return same
