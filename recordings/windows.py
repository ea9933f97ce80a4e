"""`Windows`: figures of a timeline over stretches of engine time."""

import threading
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from stepscope.recordings.latency import LatencyKind, LatencyReport
from stepscope.recordings.latency_samples import Samples
from stepscope.recordings.rates import Rates, rates_of
from stepscope.recordings.timeline import Timeline


class Breach(NamedTuple):
    """A step that brought tokens later than a bound, and the latest of them."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # without the operator's pauses
    request_id: int


class Windows:
    """Reads one timeline; what takes long is done outside its lock.

    Args:
        lock: guards the timeline.
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._breaches: list[Breach] = []  # up to the step that was scanned last
        self._scanned = -1

    def latency(self, end_ns: int | None, window_s: float | None, buckets: int) -> LatencyReport:
        """See `History.latency`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
        return part.report(start_ns, end_ns, buckets)

    def rates(self, end_ns: int | None, window_s: float | None) -> Rates:
        """See `History.rates`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return rates_of(self._timeline.columns, start_ns, end_ns)

    def samples(self, kind: LatencyKind, end_ns: int | None, window_s: float | None) -> Samples:
        """A copy of the samples."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._timeline.latencies.of(kind).cut(start_ns, end_ns)

    def breaches(self, step: int | None, limit: int) -> list[Breach]:
        """The last late tokens up to `step` (None: all), one of a kind a step, oldest first."""
        with self._lock:
            self._scan()
            known = self._breaches
            end = len(known) if step is None else bisect_right(known, step, key=_step)
            return known[max(0, end - limit) : end]

    def _scan(self) -> None:
        """Take in the steps since the last time, and forget what the timeline has forgotten."""
        timeline, known = self._timeline, self._breaches
        columns, slo = timeline.columns, timeline.slo
        steps, tokens_ns = columns.steps, columns.tokens_ns
        if not steps:
            return
        del known[: bisect_left(known, steps[0], key=_step)]
        found: list[Breach] = []
        for kind, bound_ms, name in (("ITL", slo.itl_ms, "itl"), ("TTFT", slo.ttft_ms, "ttft")):
            longest_ns = columns.column(f"max_{name}_ns")
            request_ids = columns.column(f"max_{name}_request_id")
            bound_ns = bound_ms * 1e6
            for index in range(bisect_right(steps, self._scanned), len(steps)):
                if longest_ns[index] > bound_ns:
                    found.append(
                        Breach(
                            steps[index],
                            tokens_ns[index],
                            kind,
                            longest_ns[index],
                            request_ids[index],
                        )
                    )
        known += sorted(found, key=_step)
        self._scanned = steps[-1]

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        if end_ns is None:
            end_ns = timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        tokens_ns = timeline.columns.tokens_ns
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1


def _step(breach: Breach) -> int:
    return breach.step
