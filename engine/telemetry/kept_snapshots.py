"""`KeptSnapshots`: what the engine was like a while ago, for observers that come after.

From a snapshot and the messages behind it that are still kept (`Publisher.replay`), a dashboard
that opens after an incident shows what led to it. Snapshots are kept encoded: hundreds of objects
each would slow down every garbage collection.
"""

from collections import deque
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot

INTERVAL_NS = 10_000_000_000  # between two; while nothing runs there is none
SHARE = 0.001  # of the engine's time, at most: making one is a walk over all blocks
MAX_KEPT = 30
MAX_BYTES = 16 * 1024 * 1024  # of all of them, encoded
_MARGIN = 20  # one in so many of the messages that are held may be given up while it is answered


class _Kept(NamedTuple):
    sequence: int
    step: int
    time_ns: int
    payload: bytes


class KeptSnapshots:
    """The engine's thread adds; any thread asks."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()  # oldest first
        self._num_bytes = 0
        self._next_ns = 0  # no other before

    def is_due(self, step: int, now_ns: int) -> bool:
        """Whether one is to be made, the last step being `step`."""
        return now_ns >= self._next_ns and (not self._kept or step > self._kept[-1].step)

    def add(self, snapshot: Snapshot) -> None:
        payload = wire.encode(snapshot)
        self._next_ns = snapshot.time_ns + INTERVAL_NS
        self._num_bytes += len(payload)
        self._kept.append(_Kept(snapshot.sequence, snapshot.step, snapshot.time_ns, payload))
        while len(self._kept) > MAX_KEPT or (self._num_bytes > MAX_BYTES and len(self._kept) > 1):
            self._num_bytes -= len(self._kept.popleft().payload)

    def rest(self, took_ns: int) -> None:
        """What making and adding the last one took: one that took long puts off the next."""
        self._next_ns = max(self._next_ns, self._kept[-1].time_ns + round(took_ns / SHARE))

    def before(self, past_ns: int, now_ns: int, step: int, oldest: int, end: int) -> bytes | None:
        """The newest one from which on there is all that happened in `past_ns`, or the oldest.

        Where nothing has run for a while, it is the time before that which counts.

        Args:
            step: the last one: nothing happened after a snapshot of it.
            oldest: number of the first message that is still held, and ...
            end: ... of the first that is still to come: all that is behind the snapshot is held.

        Returns:
            It is encoded: to decode megabytes of transcripts would hold up the engine. None where
            there is none from which on all messages are held.
        """
        kept = list(self._kept)
        first = oldest + (end - oldest) // _MARGIN if oldest else 0
        usable = [each for each in kept if each.sequence + 1 >= first]
        usable = [each for each in usable if each.step < step] or usable
        if not usable:
            return None
        until_ns = min(now_ns, usable[-1].time_ns + INTERVAL_NS)
        old_enough = [each for each in usable if each.time_ns <= until_ns - past_ns]
        chosen = old_enough[-1] if old_enough else usable[0]
        return chosen.payload
