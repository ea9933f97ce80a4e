"""`Comparer`: reads two runs in turn, each through its `Feed`, and compares what it has read."""

import logging
import threading
import time

from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.side.feed import Feed
from stepscope.recordings.compare.side.side import Side

log = logging.getLogger("stepscope.recordings")

_SLICE_S = 0.02  # seconds of reading at once, before other threads may run
_REST_S = 0.004
_FOLLOW_S = 0.2  # seconds between reads of a live session
_RENEW_S = 0.5  # least seconds between comparisons; `_SHARE` times their duration if longer
_SHARE = 20


class Comparer:
    """Reads and compares two runs. After `start`, a thread keeps the comparison up to date.

    `comparison`: the newest comparison; None before something of both runs was read.
    """

    def __init__(self, a: Feed, b: Feed) -> None:
        self.feeds = (a, b)
        self.comparison: Comparison | None = None
        self.version = 0  # grows with every new comparison
        self.error: str | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comparison", daemon=True)
        self._is_caught_up = False  # all that exists was read and compared

    # From any thread

    @property
    def sides(self) -> tuple[Side, Side] | None:
        """The two runs as read so far; None before something of both was read."""
        a, b = (feed.side for feed in self.feeds)
        return None if a is None or b is None else (a, b)

    @property
    def is_reading(self) -> bool:
        """Whether there are messages that have not been read and compared yet."""
        return self._thread.is_alive() and not self._is_caught_up

    @property
    def was_cancelled(self) -> bool:
        """Whether `cancel` stopped it before it had read everything."""
        return self._is_stopped.is_set() and not self._is_caught_up

    @property
    def notes(self) -> list[str]:
        """Lines for people on what is missing or went wrong, one for each problem."""
        found = [feed.note for feed in self.feeds] + [self.error]
        return list(dict.fromkeys(note for note in found if note))

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop reading, but keep what was read. Does not wait for the thread."""
        self._is_stopped.set()

    def stop(self) -> None:
        """End the thread and close both feeds."""
        self.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        for feed in self.feeds:
            feed.close()

    # Reading

    def read_some(self) -> bool:
        """Read from each run for a short time. Returns whether there was anything to read."""
        taken = False
        for feed in self.feeds:
            taken = feed.read(time.monotonic() + _SLICE_S) or taken
        return taken

    def renew(self) -> Comparison:
        """Compare what has been read so far. Only the reading thread may call it."""
        assert self.sides is not None
        self.comparison = compare(*self.sides)
        self.version += 1
        return self.comparison

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            log.exception("comparing failed")
            self.error = f"comparing failed, see the log: {error!r}"

    def _follow(self) -> None:
        due_s, is_stale = 0.0, False  # stale: the comparison lacks something that was read
        while not self._is_stopped.is_set():
            taken = self.read_some()
            has_more = any(not feed.is_done and feed.share is not None for feed in self.feeds)
            is_stale = is_stale or taken
            now_s = time.monotonic()
            if is_stale and self.sides is not None and (now_s >= due_s or not taken):
                self.renew()
                is_stale = False
                took_s = time.monotonic() - now_s
                due_s = now_s + max(_RENEW_S, _SHARE * took_s)
            if has_more:
                self._is_caught_up = False
            elif not is_stale:
                self._is_caught_up = True
            if not taken and all(feed.is_done for feed in self.feeds):
                return
            self._is_stopped.wait(_REST_S if taken else _FOLLOW_S)
        if is_stale and self.sides is not None:
            self.renew()
