"""Whether a difference between two runs says anything, or may be chance. Pure functions.

Each answers: were both runs draws from the same source, would a difference as large as this one be
rarer than 1 in 20? A "no" does not make the two equal, it says that there is too little data.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

LEVEL = 0.05
MIN_SLICES = 5
_MAX_BATCHES = 10
_MOST_KEPT = 0.95  # of a batch by the next one
_MAX_TERMS = 2000  # of an exact sum; above it the normal distribution is as good
# Two-sided 5 % points of Student's t for fewer degrees of freedom than the key; never too small.
_T_POINTS = {5: 2.78, 7: 2.58, 9: 2.37, 12: 2.27, 16: 2.18, 24: 2.12, 40: 2.07, 120: 2.03}
# The 2 % points for exactly so many, of batches less one.
_SURER_T_POINTS = {4: 3.75, 5: 3.36, 6: 3.14, 7: 3.00, 8: 2.90, 9: 2.82}


def shares_differ(a: float, num_a: int, b: float, num_b: int) -> bool:
    """Whether two shares, of so many independent observations each, differ.

    Fisher's exact test (The Design of Experiments, 1935), the normal approximation for many.
    """
    if not num_a or not num_b:
        return False
    count_a, count_b = round(a * num_a), round(b * num_b)
    hits = count_a + count_b
    if min(hits, num_a + num_b - hits) > _MAX_TERMS:
        pooled = hits / (num_a + num_b)
        deviation = math.sqrt(pooled * (1 - pooled) * (1 / num_a + 1 / num_b))
        return abs(count_a / num_a - count_b / num_b) > 1.96 * deviation
    low, high = max(0, hits - num_b), min(hits, num_a)
    whole = _log_choose(num_a + num_b, hits)
    seen = _log_choose(num_a, count_a) + _log_choose(num_b, count_b) - whole
    chance = 0.0
    for count in range(low, high + 1):
        log = _log_choose(num_a, count) + _log_choose(num_b, hits - count) - whole
        if log <= seen + 1e-7:
            chance += math.exp(log)
    return chance < LEVEL


def rates_differ(count_a: int, time_a: float, count_b: int, time_b: float) -> bool:
    """Whether events that are counted over two times come at different rates.

    Given their sum, each count is binomial if the rates are the same (Przyborowski and Wilenski,
    Biometrika 1940).
    """
    total = count_a + count_b
    if not total or time_a <= 0 or time_b <= 0:
        return False
    share = time_a / (time_a + time_b)
    if total > _MAX_TERMS:
        return abs(count_a - total * share) > 1.96 * math.sqrt(total * share * (1 - share))
    logs = [
        _log_choose(total, count) + count * math.log(share) + (total - count) * math.log1p(-share)
        for count in range(total + 1)
    ]
    return sum(math.exp(log) for log in logs if log <= logs[count_a] + 1e-7) < LEVEL


def means_differ(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the means of two runs differ, each given as means of its equal slices of time.

    Welch's t-test (Biometrika 1947) over batch means.
    """
    if min(len(a), len(b)) < MIN_SLICES:
        return False
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    part_a = _variance([x - mean_a for x in a]) / len(a) ** 2
    part_b = _variance([x - mean_b for x in b]) / len(b) ** 2
    error = part_a + part_b
    if error == 0:
        return mean_a != mean_b
    freedom = error**2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return abs(mean_a - mean_b) / math.sqrt(error) > _t_point(freedom)


def leans(values: Sequence[float]) -> bool:
    """Whether values, given in the order of time, are not 0 on average.

    Student's t-test at 2 % over batches of them. Each batch goes on as the one before it did (an
    autoregression, its bias in few batches taken off: Kendall, Biometrika 1954), so that many
    values may be few facts; how it goes on is guessed from few.
    """
    num = min(_MAX_BATCHES, len(values))
    if num < MIN_SLICES:
        return False
    mean = sum(values) / len(values)
    apart = [0.0] * num
    for place, value in enumerate(values):
        apart[place * num // len(values)] += value - mean
    squares = sum(x * x for x in apart)
    if squares == 0:
        return mean != 0
    kept = (sum(x * y for x, y in pairwise(apart)) / squares + 1 / num) / (1 - 3 / num)
    kept = min(_MOST_KEPT, max(0.0, kept))
    error = squares * num / (num - 1) * (1 + kept) / (1 - kept)
    return abs(sum(values)) / math.sqrt(error) > _SURER_T_POINTS[num - 1]


def _variance(apart: Sequence[float]) -> float:
    """Of the sum of what is so far from its mean, with what neighbours have in common."""
    variance = sum(x * x for x in apart)
    variance += 2 * max(0.0, sum(x * y for x, y in pairwise(apart)))
    return variance * len(apart) / (len(apart) - 1)


def _t_point(freedom: float) -> float:
    return next((t for below, t in _T_POINTS.items() if freedom < below), 1.98)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
