"""`LatencyWindows`: the reports of the latency screen, as often as they are worth their price."""

from collections.abc import Callable

from stepscope.recordings.history import History
from stepscope.recordings.latency import LatencyReport

WINDOWS: tuple[tuple[str, float | None], ...] = (("10 s", 10.0), ("60 s", 60.0), ("all", None))
_REFRESH_S = 1.0
_SHARE = 150  # a report is taken anew after so many times what it took


class LatencyWindows:
    """Keeps the reports between frames. Belongs to the UI thread.

    Args:
        clock: seconds, for pacing only.
    """

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        self._history = history
        self._clock = clock
        self._reports: dict[str, LatencyReport] = {}
        self._due_s: dict[str, float] = {}
        self._end_ns: int | None = None

    def reports(self, end_ns: int | None) -> dict[str, LatencyReport]:
        """One for each window that ends at `end_ns` (None: now)."""
        if end_ns != self._end_ns:
            self._end_ns, self._due_s = end_ns, {}
        for name, window_s in WINDOWS:
            start_s = self._clock()
            if start_s < self._due_s.get(name, start_s):
                continue
            if end_ns is not None and name in self._due_s:
                continue
            self._reports[name] = self._history.latency(end_ns, window_s)
            now_s = self._clock()
            self._due_s[name] = now_s + max(_REFRESH_S, _SHARE * (now_s - start_s))
        return dict(self._reports)
