"""`predicted`: one figure of several simulated runs, with an interval for a real session.

The interval is conformal (Vovk et al., "Algorithmic Learning in a Random World", 2005; scores
scaled as in Papadopoulos et al., 2008): as many times as wide as the runs are spread that nine in
ten real sessions fell into it. `tests/bench/bench_what_if.py` finds how many times.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# By what a figure's name begins with, from pairs of real runs (docs/simulate.md): for recordings
# that saw several values of their knobs, and for those that saw one.
_VARIED = {"ttft": 3.0, "itl": 2.1, "e2e": 2.4}
_FIXED = {"ttft": 5.2, "itl": 2.6, "e2e": 3.4}
_LEAST = 0.03  # of the logarithm: no two sessions are closer


class Predicted(NamedTuple):
    """One figure: the median of the runs, and where nine in ten sessions should lie."""

    value: float
    low: float
    high: float


def family(name: str) -> str:
    """Whose widening a figure has; rates go with the time of whole requests."""
    begin = name.partition("_")[0]
    return begin if begin in _VARIED else "e2e"


def widening(name: str, *, is_varied: bool) -> float:
    """How many times as wide as the spread of the runs an interval of this figure is, each way.

    Args:
        is_varied: the recording has steps under several values of its knobs.
    """
    return (_VARIED if is_varied else _FIXED)[family(name)]


def predicted(
    runs: Sequence[Mapping[str, float | None]], *, is_varied: bool
) -> dict[str, Predicted]:
    """Of each figure that the runs have."""
    found = {}
    for name in runs[0]:
        values = sorted(value for run in runs if (value := run[name]) is not None)
        if values:
            found[name] = _of(values, widening(name, is_varied=is_varied))
    return found


def _of(values: Sequence[float], times: float) -> Predicted:
    """`values`: in ascending order."""
    median = statistics.median(values)
    if values[0] <= 0 or len(values) < 2:  # counts and shares that may be zero
        last = len(values) - 1
        return Predicted(median, values[round(0.05 * last)], values[round(0.95 * last)])
    spread = statistics.pstdev(math.log(value) for value in values)
    factor = math.exp(times * math.hypot(spread, _LEAST))
    return Predicted(median, median / factor, median * factor)
