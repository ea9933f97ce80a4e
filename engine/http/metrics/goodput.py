"""`GoodputRate`: requests per second that met their service levels, over the last minute."""

from collections import deque

_WINDOW_NS = 60_000_000_000


class GoodputRate:
    """Counts the requests that met their service levels. Times are on the engine's clock.

    The rate covers the time since the first message after `restart`, at most one minute.
    """

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._now_ns = 0
        self._kept_ns: deque[int] = deque()  # when each request finished

    def restart(self) -> None:
        """Forget all requests so far, because messages about them are missing."""
        self._since_ns = None
        self._kept_ns.clear()

    def advance(self, now_ns: int) -> None:
        """Set the current time on the engine's clock, and forget requests older than a minute."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._now_ns = now_ns
        while self._kept_ns and self._kept_ns[0] <= now_ns - _WINDOW_NS:
            self._kept_ns.popleft()

    def add(self, time_ns: int) -> None:
        """Count a request that finished within its service levels."""
        self._kept_ns.append(time_ns)

    @property
    def per_s(self) -> float | None:
        """Requests per second that met their service levels. None until some time has passed."""
        if self._since_ns is None or self._now_ns <= self._since_ns:
            return None
        return len(self._kept_ns) * 1e9 / min(self._now_ns - self._since_ns, _WINDOW_NS)
