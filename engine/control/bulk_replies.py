"""`BulkReplies`: encodes and sends large answers on its own thread, at a limited rate.

Every viewer may ask for messages of the replay ring, snapshots and pages of the audit trail.
However many ask, the thread uses at most `SHARE` of one core, in slices so short that other threads
get the GIL in time. It sends at most `TOTAL_RATE` bytes a second, after a burst of `TOTAL_BURST`.
The client with the fewest open questions (unanswered queries) is served first. Among equals, it is
the client that received least. So a client that asks one question at a time does not wait behind a
client that asks many.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.protocol import replies
from stepscope.engine.protocol.replies import AnyReply, Error, Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.telemetry.publisher import MAX_REPLAY_BYTES

log = logging.getLogger("stepscope.engine")

SHARE = 0.02  # of one core's time
CLIENT_RATE, CLIENT_BURST = 4e6, 16e6  # bytes a second, bytes at once
TOTAL_RATE, TOTAL_BURST = 4e6, 16e6  # of all clients together
MIN_BYTES = 65_536  # a smaller answer counts as this many bytes
MAX_PENDING = 64  # open questions of one client
MAX_CLIENTS = 10_000
MAX_REPLAY_FRAMES = 2_000  # in one answer; the client asks again for more
SLICE = 64  # messages read at a time

# Yields None between pieces of work, where the thread may pause, and the answer last.
Parts: TypeAlias = Iterator[AnyReply | msgspec.Raw | None]


class _Job(NamedTuple):
    client: RemoteClient
    parts: Parts


@dataclass(slots=True)
class _Share:
    """The byte allowance of one client, and its open questions (unanswered queries)."""

    level: float
    filled_s: float
    num_pending: int = 0
    jobs: deque[_Job] = field(default_factory=deque)

    def fill(self, now_s: float, rate: float, burst: float) -> None:
        self.level = min(burst, self.level + (now_s - self.filled_s) * rate)
        self.filled_s = now_s


def replayed(replay: Callable[[int, int], Replayed], sequence: int, limit: int) -> Parts:
    """Yield None several times while collecting messages, then the answer to `ReplayFrom`.

    So the caller can pause in between.

    Args:
        replay: returns messages of the ring, from a sequence number, up to a limit.
    """
    frames: list[ReplayedFrame] = []
    num_bytes, ring = 0, replay(0, 0)
    sequence = max(sequence, ring.oldest_sequence)
    end = min(ring.next_sequence, sequence + min(limit, MAX_REPLAY_FRAMES))
    while sequence < end:
        some = replay(sequence, min(SLICE, end - sequence)).frames
        sequence = some[-1].sequence + 1 if some else sequence + SLICE  # the ring dropped these
        for frame in some:
            num_bytes += len(frame.payload)
            if frames and num_bytes > MAX_REPLAY_BYTES:
                end = sequence
                break
            frames.append(frame)
        yield None
    oldest = replay(0, 0).oldest_sequence
    yield Replayed(frames=frames, oldest_sequence=oldest, next_sequence=ring.next_sequence)


def at_once(reply: AnyReply | msgspec.Raw) -> Parts:
    """Yield an answer that is ready and only needs encoding, in the form of `replayed`."""
    yield reply


class BulkReplies:
    """Encodes and sends large answers at a limited rate. Any thread may call it.

    Args:
        post: receives each encoded answer.
        clock: returns seconds.
    """

    def __init__(
        self,
        post: Callable[[tuple[RemoteClient, msgspec.Raw | Error]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._clock = clock
        self._shares: dict[bytes, _Share] = {}
        self._total = _Share(TOTAL_BURST, clock())
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._last: tuple[Snapshot | None, msgspec.Raw] = (None, msgspec.Raw())
        self._thread = threading.Thread(target=self._run, name="bulk replies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop the open questions and end the thread."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join()

    def reserve(self, account: bytes) -> bool:
        """Count a new question of a client.

        Returns False if the client has too many open questions.
        """
        with self._changed:
            share = self._share(account)
            if share.num_pending >= MAX_PENDING:
                return False
            share.num_pending += 1
            return True

    def answer(self, account: bytes, client: RemoteClient, parts: Parts) -> None:
        """Queue the answer to a question that was counted by `reserve`."""
        with self._changed:
            self._share(account).jobs.append(_Job(client, parts))
            self._changed.notify()

    def release(self, account: bytes) -> None:
        """Note that a question counted by `reserve` was answered, so it is not open any more."""
        with self._changed:
            share = self._share(account)
            share.num_pending = max(0, share.num_pending - 1)

    def forget(self, identity: bytes) -> None:
        """Drop the queued answers to a connection that is gone."""
        with self._changed:
            for share in self._shares.values():
                kept = deque(job for job in share.jobs if job.client.identity != identity)
                share.num_pending -= len(share.jobs) - len(kept)
                share.jobs = kept

    # The thread

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            share, job = taken
            reply: msgspec.Raw | Error
            try:
                reply = self._made(job.parts)
            except Exception:
                log.exception("an answer could not be made")
                reply = Error(code="internal", message="the engine failed; its log says why")
            with self._changed:
                if isinstance(reply, msgspec.Raw):
                    num_bytes = max(MIN_BYTES, len(bytes(reply)))
                    share.level -= num_bytes
                    self._total.level -= num_bytes
            self._post((job.client, reply))  # the sender then calls `release`

    def _next(self) -> tuple[_Share, _Job] | None:
        """Wait until the rates allow the next answer, and return it. None after `close`."""
        with self._changed:
            while not self._closing.is_set():
                now_s = self._clock()
                self._total.fill(now_s, TOTAL_RATE, TOTAL_BURST)
                waiting = [each for each in self._shares.values() if each.jobs]
                for each in waiting:
                    each.fill(now_s, CLIENT_RATE, CLIENT_BURST)
                share = min(waiting, key=_place, default=None)
                if share is None:
                    self._changed.wait()
                    continue
                pause_s = max(-self._total.level / TOTAL_RATE, -share.level / CLIENT_RATE)
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
                return share, share.jobs.popleft()
        return None

    def _made(self, parts: Parts) -> msgspec.Raw:
        # Measure only this thread's CPU time, without its waits for the GIL.
        began_s = time.thread_time()
        for part in parts:
            raw = None if part is None else self._encoded(part)
            took_s = time.thread_time() - began_s
            self._closing.wait(took_s * (1 / SHARE - 1))
            began_s = time.thread_time()
            if raw is not None:
                return raw
        raise AssertionError("an answer has a last part")

    def _encoded(self, reply: AnyReply | msgspec.Raw) -> msgspec.Raw:
        if isinstance(reply, msgspec.Raw):
            return reply
        if reply is self._last[0]:
            return self._last[1]
        raw = msgspec.Raw(replies.encode(reply))
        if isinstance(reply, Snapshot):  # many clients ask for the same snapshot
            self._last = (reply, raw)
        return raw

    def _share(self, account: bytes) -> _Share:
        share = self._shares.get(account)
        if share is None:
            if len(self._shares) >= MAX_CLIENTS:
                self._forget_idle()
            share = self._shares[account] = _Share(CLIENT_BURST, self._clock())
        return share

    def _forget_idle(self) -> None:
        now_s = self._clock()
        for account, share in list(self._shares.items()):
            share.fill(now_s, CLIENT_RATE, CLIENT_BURST)
            if not share.num_pending and share.level >= CLIENT_BURST:
                del self._shares[account]


def _place(share: _Share) -> tuple[int, float]:
    return len(share.jobs), -share.level
