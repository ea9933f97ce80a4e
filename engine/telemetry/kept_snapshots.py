"""`KeptSnapshots`: snapshots of the last minutes, for observers that join later.

A dashboard that opens after an incident gets a kept snapshot and the kept messages after it
(`Publisher.replay`), and so shows what led to the incident. Snapshots are kept encoded: as hundreds
of objects each they would slow down every garbage collection.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot

INTERVAL_NS = 10_000_000_000  # between two snapshots; none is made while no step runs
SHARE = 0.001  # of the engine's time, at most: making a snapshot is a walk over all blocks
MAX_KEPT = 30
MAX_BYTES = 16 * 1024 * 1024  # of all of them, encoded
_MARGIN = 20  # 1/20 of the kept messages may be dropped before the client asks for them


class _Kept(NamedTuple):
    sequence: int
    step: int
    time_ns: int
    payload: bytes


class KeptSnapshots:
    """The last snapshots. The engine's thread adds them; any thread may ask for one."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()  # oldest first
        self._num_bytes = 0
        self._next_ns = 0  # the next snapshot is made no earlier

    def keep(
        self, step: int, now_ns: int, make: Callable[[], Snapshot], clock: Callable[[], int]
    ) -> None:
        """Make a snapshot and keep it, if one is due after `step`, the last one."""
        if now_ns < self._next_ns or (self._kept and step <= self._kept[-1].step):
            return
        snapshot = make()
        payload = wire.encode(snapshot)
        self._num_bytes += len(payload)
        self._kept.append(_Kept(snapshot.sequence, snapshot.step, snapshot.time_ns, payload))
        while len(self._kept) > MAX_KEPT or (self._num_bytes > MAX_BYTES and len(self._kept) > 1):
            self._num_bytes -= len(self._kept.popleft().payload)
        rest_ns = max(INTERVAL_NS, round((clock() - now_ns) / SHARE))
        self._next_ns = snapshot.time_ns + rest_ns

    def before(self, past_ns: int, now_ns: int, step: int, oldest: int, end: int) -> bytes | None:
        """Return the newest snapshot that is at least `past_ns` old, or else the oldest one.

        Only those count after which all messages are still kept (`oldest` to `end`); None without
        any. If no step has run for a while, `past_ns` counts from when steps last ran. One made
        after `step`, the last one, has nothing to show and is chosen only for want of others. It is
        encoded: decoding megabytes of transcripts would hold up the engine.
        """
        kept = list(self._kept)
        first = oldest + (end - oldest) // _MARGIN if oldest else 0
        usable = [each for each in kept if each.sequence + 1 >= first]
        usable = [each for each in usable if each.step < step] or usable
        if not usable:
            return None
        until_ns = min(now_ns, usable[-1].time_ns + INTERVAL_NS)
        old_enough = [each for each in usable if each.time_ns <= until_ns - past_ns]
        return (old_enough or usable[:1])[-1].payload
