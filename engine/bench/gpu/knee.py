"""Finds the knee of step time over tokens: where a step becomes compute-bound.

A step of few tokens takes as long as a step of a single token, because it must read all weights (or
launch all kernels). The time of a large step is proportional to its tokens. The knee is the number
of tokens where the two lines meet: the time of the smallest steps, times the tokens per second of
the largest. Below the knee, more tokens in a step cost almost no time, so a token budget should not
be smaller than the knee.
"""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

NUM_FLAT = 3  # the smallest steps, which give the least time of a step
NUM_STEEP = 4  # the largest steps, which give the slope


class Knee(NamedTuple):
    flat_ms: float  # of the smallest steps
    tokens_per_s: float  # added tokens per added second, among the largest steps
    tokens: float
    budget: int  # the power of two at or above it
    budget_share: float | None  # tokens per second at that budget, over the best measured


def find_knee(times_ms: Mapping[int, float]) -> Knee | None:
    """Return the knee. None for too few points, or if the time does not grow with the tokens.

    Args:
        times_ms: the time of a step, by its number of tokens.
    """
    points = sorted(times_ms.items())
    if len(points) < NUM_FLAT + NUM_STEEP:
        return None
    flat_ms = statistics.median(ms for _, ms in points[:NUM_FLAT])
    steep = points[-NUM_STEEP:]
    slope = statistics.linear_regression([n for n, _ in steep], [ms for _, ms in steep]).slope
    if slope <= 0 or flat_ms <= 0:
        return None
    tokens = flat_ms / slope
    budget = 1 << max(0, (max(1, round(tokens)) - 1).bit_length())
    rates = {n: n / ms for n, ms in points}
    near = [n for n, _ in points if n >= budget]
    share = rates[near[0]] / max(rates.values()) if near else None
    return Knee(flat_ms, 1e3 / slope, tokens, budget, share)
