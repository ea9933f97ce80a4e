"""`BulkReplies`: answers queries with large answers on its own thread.

Every viewer may ask for messages of the replay ring, snapshots and pages of the audit trail.
However many ask, the thread uses at most `SHARE` of one core, with answers so small that other
threads get the GIL in time, and sends at most `RATE` bytes a second, after a burst of `BURST`. Who
asks the fewest questions at a time is served first. The bytes of an answer are charged to the
client, too (`RateLimiter.charge_bytes`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.inbox import Call, Inbox
from stepscope.engine.protocol import replies
from stepscope.engine.protocol.commands import GetAudit, GetKeptSnapshot, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import AnyReply, Error, Replayed
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.transport.rate_limit import TokenBucket


class ServedEngine(Protocol):
    """An engine, as the control socket uses it. Any thread may use all members."""

    @property
    def inbox(self) -> Inbox: ...
    @property
    def control_tally(self) -> ControlTally: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def next_step(self) -> int:
        """Number of the step that is scheduled next."""

    @property
    def last_step(self) -> int:
        """Number of the last published step, -1 before the first."""

    @property
    def kept_snapshots(self) -> KeptSnapshots: ...
    @property
    def max_waiting(self) -> int:
        """With this many commands in the inbox, a further `Submit` is refused."""

    def clock(self) -> int:
        """Return the current time on the engine's clock, in nanoseconds."""


log = logging.getLogger("stepscope.engine")

SHARE = 0.02  # of one core's time
RATE, BURST = 4e6, 16e6  # bytes a second, bytes at once, to all clients together
MIN_BYTES = 65_536  # a smaller answer counts as this many bytes
MAX_PENDING = 64  # answers that one client waits for
MAX_REPLAY_FRAMES = 256  # in one answer; the client asks again for more

BulkQuestion: TypeAlias = ReplayFrom | GetSnapshot | GetKeptSnapshot | GetAudit
Made: TypeAlias = AnyReply | msgspec.Raw
Make: TypeAlias = Callable[[], Made]


class BulkReplies:
    """Gets large answers, and encodes and posts them at a limited rate. Any thread may call it."""

    def __init__(
        self,
        engine: ServedEngine,
        replay: Callable[[int, int], Replayed],
        post: Callable[[tuple[RemoteClient, msgspec.Raw | Error]], None],
    ) -> None:
        self._engine = engine
        self._replay = replay
        self._post = post
        self._waiting: dict[bytes, deque[tuple[RemoteClient, Make]]] = {}  # by account
        self._room = TokenBucket(RATE, BURST, time.monotonic())
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

    def begin(self, command: BulkQuestion, client: RemoteClient) -> None:
        """Start to answer a query. Raises ConfigError if too many answers wait for the client."""
        if len(self._waiting.get(client.account, ())) >= MAX_PENDING:
            raise ConfigError("rate_limited", "too much of what you asked waits for an answer")
        if isinstance(command, ReplayFrom):
            limit = min(command.limit, MAX_REPLAY_FRAMES)
            self._queue(client, lambda: self._replay(command.sequence, limit))
        elif isinstance(command, GetKeptSnapshot):
            self.answer(client, self._kept_snapshot(command))
        else:
            self._engine.inbox.put(Call(command, client, lane=client.account))

    def answer(self, client: RemoteClient, reply: Made) -> None:
        """Queue the engine's answer to a query."""
        self._queue(client, lambda: reply)

    def forget(self, identity: bytes) -> None:
        """Drop the queued answers to a connection that is gone."""
        with self._changed:
            for account, waiting in list(self._waiting.items()):
                kept = deque(each for each in waiting if each[0].identity != identity)
                self._waiting[account] = kept
                if not kept:
                    del self._waiting[account]

    def _queue(self, client: RemoteClient, make: Make) -> None:
        with self._changed:
            self._waiting.setdefault(client.account, deque()).append((client, make))
            self._changed.notify()

    def _kept_snapshot(self, command: GetKeptSnapshot) -> msgspec.Raw | Error:
        engine, ring = self._engine, self._replay(0, 0)
        oldest, end, past_ns = ring.oldest_sequence, ring.next_sequence, round(command.past_s * 1e9)
        kept = engine.kept_snapshots
        payload = kept.before(past_ns, engine.clock(), engine.last_step, oldest, end)
        if payload is None:
            return Error(code="nothing_kept", message="the engine keeps no snapshot from that time")
        return msgspec.Raw(payload)

    # The thread

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            client, make = taken
            reply: msgspec.Raw | Error
            try:
                reply = self._made(make)
            except Exception:
                log.exception("an answer could not be made")
                reply = Error(code="internal", message="the engine failed; its log says why")
            self._post((client, reply))

    def _next(self) -> tuple[RemoteClient, Make] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            if self._closing.is_set():
                return None
            account = min(self._waiting, key=lambda each: len(self._waiting[each]))
            waiting = self._waiting.pop(account)
            taken = waiting.popleft()
            if waiting:
                self._waiting[account] = waiting  # behind others that wait for as many
            return taken

    def _made(self, make: Make) -> msgspec.Raw:
        # Measure only this thread's CPU time, without its waits for the GIL.
        began_s = time.thread_time()
        reply = make()
        if isinstance(reply, msgspec.Raw):
            raw = reply
        elif reply is self._last[0]:  # many clients ask for the same snapshot
            raw = self._last[1]
        else:
            raw = msgspec.Raw(replies.encode(reply))
            if isinstance(reply, Snapshot):
                self._last = (reply, raw)
        took_s = time.thread_time() - began_s
        self._room.spend(max(MIN_BYTES, len(bytes(raw))), time.monotonic())
        self._closing.wait(max(took_s * (1 / SHARE - 1), self._room.wait_s(0.0)))
        return raw
