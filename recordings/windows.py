"""`Windows`: figures of a timeline over stretches of engine time."""

import threading
from typing import Literal, NamedTuple

from stepscope.recordings.columns import Rates
from stepscope.recordings.latency import LatencyKind, LatencyReport
from stepscope.recordings.timeline import Timeline


class Breach(NamedTuple):
    """A step that brought tokens later than a bound, and the latest of them."""

    step: int
    time_ns: int
    kind: Literal["TTFT", "ITL"]
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
            return self._timeline.columns.rates(start_ns, end_ns)

    def samples(
        self, kind: LatencyKind, end_ns: int | None, window_s: float | None
    ) -> list[tuple[int, int, int]]:
        """Samples as (time, latency, weight), in order of time."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.of(kind).cut(start_ns, end_ns)
        return list(part)

    def breaches(self, step: int | None, limit: int) -> list[Breach]:
        """The last steps up to `step` (None: all) with a late token, oldest first."""
        with self._lock:
            timeline = self._timeline
            columns, slo = timeline.columns, timeline.slo
            itl_ns, ttft_ns = slo.itl_ms * 1e6, slo.ttft_ms * 1e6
            itl, itl_id = columns.column("max_itl_ns"), columns.column("max_itl_request_id")
            ttft, ttft_id = columns.column("max_ttft_ns"), columns.column("max_ttft_request_id")
            steps, tokens_ns = columns.steps, columns.tokens_ns
            found: list[Breach] = []
            for index in range(len(steps) - 1, -1, -1):
                if step is not None and steps[index] > step:
                    continue
                if len(found) >= limit:
                    break
                if itl[index] > itl_ns:
                    found.append(
                        Breach(steps[index], tokens_ns[index], "ITL", itl[index], itl_id[index])
                    )
                if ttft[index] > ttft_ns:
                    found.append(
                        Breach(steps[index], tokens_ns[index], "TTFT", ttft[index], ttft_id[index])
                    )
        found.reverse()
        return found

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        if end_ns is None:
            end_ns = timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        tokens_ns = timeline.columns.tokens_ns
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1
