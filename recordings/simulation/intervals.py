"""`predicted`: figures predicted from several simulated runs, with intervals for a real session.

The intervals are conformal (Vovk et al., "Algorithmic Learning in a Random World", 2005; scores
scaled as in Papadopoulos et al., 2008): the half width is the spread of the runs times a factor.
The factors were chosen between those of a quiet and of a disturbed machine, so that about nine in
ten real sessions fall into the interval on both. `tests/bench/bench_what_if.py` finds the factors
of one machine.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Prefix of a figure's name -> factor, from pairs of real runs (docs/simulate.md). `_VARIED` is for
# recordings with several values of their knobs, `_FIXED` for those with one.
_VARIED = {"ttft": 2.5, "itl": 1.9, "e2e": 2.0}
_FIXED = {"ttft": 3.6, "itl": 1.9, "e2e": 2.4}
_LEAST = 0.03  # least spread of the logarithm, as no two sessions are closer


class Predicted(NamedTuple):
    """A predicted figure: the median of the runs, and an interval for nine in ten sessions."""

    value: float
    low: float
    high: float


def family(name: str) -> str:
    """Return the prefix of a figure's name ("ttft", "itl", "e2e") whose factor the figure uses.

    Rates, counts and shares use the factor of "e2e".
    """
    begin = name.partition("_")[0]
    return begin if begin in _VARIED else "e2e"


def widening(name: str, *, is_varied: bool) -> float:
    """Return the factor by which the spread of the runs is multiplied for a figure's interval.

    The product is the half width of the interval, on a logarithmic scale.

    `is_varied`: whether the recording has steps under several values of its knobs.
    """
    return (_VARIED if is_varied else _FIXED)[family(name)]


def predicted(
    runs: Sequence[Mapping[str, float | None]], *, is_varied: bool
) -> dict[str, Predicted]:
    """Return the prediction of each figure that has a value in at least one run.

    `runs`: name -> value of the figures of each run.
    """
    found = {}
    for name in runs[0]:
        values = sorted(value for run in runs if (value := run[name]) is not None)
        if values:
            found[name] = _of(values, widening(name, is_varied=is_varied))
    return found


def _of(values: Sequence[float], times: float) -> Predicted:
    """Predict one figure from its values in the runs, given in ascending order."""
    median = statistics.median(values)
    if values[0] <= 0 or len(values) < 2:  # counts and shares that may be zero
        last = len(values) - 1
        return Predicted(median, values[round(0.05 * last)], values[round(0.95 * last)])
    spread = statistics.pstdev(math.log(value) for value in values)
    factor = math.exp(times * math.hypot(spread, _LEAST))
    return Predicted(median, median / factor, median * factor)
