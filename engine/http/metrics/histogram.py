"""`Histogram`: a Prometheus histogram (cumulative buckets) whose `observe` costs almost nothing.

prometheus_client's own histogram takes a lock and scans the buckets for each value. There is a
value for each token of each step, so this would slow down the streams on the same core.
"""

from bisect import bisect_left
from collections.abc import Sequence

# vLLM 0.32's bucket bounds, so that its boards fit.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# Our own bounds, because a step of a small model takes a fraction of a millisecond.
STEP_SECONDS = tuple(
    mantissa * 10.0**power for power in range(-4, 1) for mantissa in (1.0, 2.0, 5.0)
)


def request_tokens(max_model_len: int) -> tuple[float, ...]:
    """Return bucket bounds for lengths in tokens: 1, 2, 5, 10, ... up to the longest request."""
    bounds: list[float] = []
    unit = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * unit > max_model_len:
                return tuple(bounds)
            bounds.append(float(mantissa * unit))
        unit *= 10


class Histogram:
    """The number of values in each bucket, and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound with the number of values up to it, as Prometheus expects."""
        total = 0
        found: list[tuple[str, float]] = []
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found
