"""The test behind every verdict: do two runs differ by more than each varies in itself?

A figure of a run is a ratio of sums over equal stretches of the run: tokens per second, hits per
queried token, or the share of late waits. Its error is estimated with the jackknife: from how badly
the other stretches predict each stretch (Efron and Stein, Annals of Statistics 1981). Neighbouring
stretches are alike, so their covariance counts (Newey and West, Econometrica 1987). Welch's t-test
(Biometrika 1947) at 1 % then compares two runs.

The level is 1 %, not 5 %: a comparison tests a dozen figures, and should name no winner in 19 of 20
pairs of equal runs (`tests/bench/bench_compare_chance.py` measures it). If the speed of the machine
drifts by some percent for seconds, it is about 11 of 12: a run cannot distinguish a drift that
lasts longer than a stretch from a difference.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

CONFIDENCE = 0.99
MIN_STRETCHES = 5  # with fewer, no difference is sure
# Two-sided 1 % points of Student's t for fewer degrees of freedom than the key; never too small.
_T_POINTS = {5: 4.61, 6: 4.04, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25, 12: 3.17, 14: 3.06, 17: 2.98,
             20: 2.90, 30: 2.85, 60: 2.76}  # fmt: skip


class Estimate(NamedTuple):
    """The value of a figure in a run, with the data to estimate its error.

    Attributes:
        apart: for each stretch, how far it moves the value from what the other stretches predict.
        freedom: degrees of freedom: stretches with any data, less one; at least 1.
    """

    value: float
    apart: list[float]
    freedom: int


NOTHING = Estimate(0.0, [], 1)  # exactly zero


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate | None:
    """Estimate the sum of `parts` divided by the sum of `wholes`, with one of each per stretch.

    None if fewer than `MIN_STRETCHES` stretches have a whole above zero.
    """
    known = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole]
    if len(known) < MIN_STRETCHES:
        return None
    sum_part, sum_whole = (math.fsum(column) for column in zip(*known, strict=True))
    apart = [
        (part - whole * (sum_part - part) / (sum_whole - whole)) / sum_whole
        for part, whole in known
    ]
    return Estimate(sum_part / sum_whole, apart, len(known) - 1)


def differ(a: Estimate | None, b: Estimate | None) -> bool:
    """Whether two runs surely differ in a figure; False if one of them is too short."""
    if a is None or b is None or a.value == b.value:
        return False
    variance_a, variance_b = _variance(a.apart), _variance(b.apart)
    variance = variance_a + variance_b
    if variance == 0:
        return True
    freedom = variance**2 / (variance_a**2 / a.freedom + variance_b**2 / b.freedom)
    return abs(a.value - b.value) / math.sqrt(variance) > _t_point(freedom)


def differ_in_pairs(a: Estimate, b: Estimate) -> bool:
    """Like `differ`, for runs that did the same work in the same stretches.

    The effect of the work then cancels out, so smaller differences are found.
    """
    if len(a.apart) != len(b.apart):
        return differ(a, b)
    apart = [x - y for x, y in zip(a.apart, b.apart, strict=True)]
    return differ(Estimate(a.value - b.value, apart, min(a.freedom, b.freedom)), NOTHING)


def _variance(apart: Sequence[float]) -> float:
    variance = sum(x * x for x in apart)
    variance += 2 * max(0.0, sum(x * y for x, y in pairwise(apart)))
    return variance * (len(apart) - 1) / max(1, len(apart))


def _t_point(freedom: float) -> float:
    return next((t for below, t in _T_POINTS.items() if freedom < below), 2.67)
