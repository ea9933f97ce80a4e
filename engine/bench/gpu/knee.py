"""Where a step becomes bound by its computing: the knee of its time over its tokens.

Few tokens take as long as one, because the weights have to be read (or the kernels launched); many
take time in proportion. The knee is where the two are equal: the time of the smallest steps, times
the tokens a second that the largest ones add. Beyond it a token costs what it costs anywhere; below
it a step has room for tokens that cost next to nothing, so a token budget should not be smaller.
"""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

# So many of the smallest steps say what a step costs at least, and of the largest the slope.
NUM_FLAT = 3
NUM_STEEP = 4


class Knee(NamedTuple):
    flat_ms: float  # of the smallest steps
    tokens_per_s: float  # that the largest steps add
    tokens: float
    budget: int  # the power of two at or above it
    budget_share: float | None  # of the best tokens a second measured, at that budget


def find_knee(times_ms: Mapping[int, float]) -> Knee | None:
    """`times_ms`: of a step, by its tokens. None: too few, or time does not grow with tokens."""
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
