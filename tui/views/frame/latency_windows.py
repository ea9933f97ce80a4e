"""`LatencyWindows`: computes the latency reports of the latency page, one per time window.

A report that is expensive to compute is computed less often.
"""

import threading
from collections.abc import Callable

from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import LatencyReport

WINDOWS: tuple[tuple[str, float | None], ...] = (("10 s", 10.0), ("60 s", 60.0), ("all", None))
_REFRESH_S = 1.0
_SHARE = 150  # a report that took t seconds is made again after 150 t,
_MOST_S, _MOST_ALL_S = 5.0, 30.0  # but not later than this: a busy machine must not age it
_LONG_STEPS = 10_000  # from this many steps on, a separate thread makes the report over all


class LatencyWindows:
    """Keeps latency reports between frames, without outdated ones. For the UI thread."""

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        self._history = history
        self._clock = clock
        self._reports: dict[str, LatencyReport] = {}
        self._due_s: dict[str, float] = {}
        self._end_ns: int | None = None
        self._reach: int | None = None  # first step in memory; earlier ones may be loaded later
        self._is_moving = False  # while the operator moves in time, costly reports wait
        self._thread: threading.Thread | None = None
        self._done: tuple[int | None, LatencyReport, float] | None = None  # the thread's result

    @property
    def is_busy(self) -> bool:
        """Whether a report is still to come: in work, or delayed while the operator moves."""
        return self._thread is not None or self._is_moving

    def reports(self, end_ns: int | None) -> dict[str, LatencyReport]:
        """Return window name -> report, for the windows that end at `end_ns` (None means now)."""
        if self._history.is_short:
            self._due_s, self._reports = {}, {}
            return {}
        self._is_moving = end_ns != self._end_ns and end_ns is not None
        reach, before = self._history.first_step, self._reach
        self._reach = reach
        is_longer = reach is not None and before is not None and reach < before
        if end_ns != self._end_ns or is_longer:
            self._end_ns, self._due_s, self._reports = end_ns, {}, {}
        for name, window_s in WINDOWS:
            if window_s is None and self._history.num_steps >= _LONG_STEPS:
                self._update_all(name)
            elif self._is_due(name):
                start_s = self._clock()
                self._keep(
                    name, self._history.windows.latency(end_ns, window_s), self._clock() - start_s
                )
        return dict(self._reports)

    def _is_due(self, name: str) -> bool:
        if name in self._reports and self._end_ns is not None:
            return False  # the past does not change
        due_s = self._due_s.get(name)
        return due_s is None or self._clock() >= due_s

    def _keep(self, name: str, report: LatencyReport, took_s: float) -> None:
        self._reports[name] = report
        most_s = _MOST_ALL_S if dict(WINDOWS)[name] is None else _MOST_S
        self._due_s[name] = self._clock() + min(most_s, max(_REFRESH_S, _SHARE * took_s))

    def _update_all(self, name: str) -> None:
        thread = self._thread
        if thread is not None:
            if thread.is_alive():
                return
            self._thread = None
            if self._done is not None and self._done[0] == self._end_ns:
                self._keep(name, *self._done[1:])
        if not self._is_moving and self._is_due(name):
            self._thread = threading.Thread(
                target=self._work, args=(self._end_ns,), name="latency of all", daemon=True
            )
            self._thread.start()

    def _work(self, end_ns: int | None) -> None:
        start_s = self._clock()
        report = self._history.windows.latency(end_ns, None)
        self._done = end_ns, report, self._clock() - start_s
