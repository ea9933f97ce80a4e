"""`RateLimiter`: how much of the control thread a client may have. Belongs to that thread.

Two bounds (token buckets, as in RFC 2697): one for each client, beyond which its commands are
refused, and one for all together, beyond which nothing is read for a moment: what is not read stays
in the queue of who sent it, and libzmq takes from all connections in turn, so no client waits for a
flood of another's. Then some are read at once: each waking takes the interpreter from the
engine's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.engine.protocol.commands import (
    Abort,
    Change,
    Command,
    GetAudit,
    GetInfo,
    GetKeptSnapshot,
    GetSnapshot,
    ReplayFrom,
    Submit,
    Withdraw,
)

CLIENT_RATE, CLIENT_BURST = 1_000.0, 2_000.0  # units a second, units at once
TOTAL_RATE, TOTAL_BURST = 8_000.0, 16_000.0
MESSAGE = 0.2  # units of any message, ...
BYTES_PER_UNIT = 65_536
# Of text that is tokenised on the control thread, which takes 1 to 2 million characters a second:
# half a million for one client (the HTTP server is one, too), and as many for all together.
CLIENT_CHARS, TOTAL_CHARS = 512, 64  # for a unit
REFUSED = 32.0  # ... and what a refused one takes from the bound of all
PAUSE_S = 0.02  # so much is saved before anything is read again
FIRST_REPORT_S, REPORT_S = 0.5, 5.0  # how soon, and how often, a client's flood is reported
MAX_CLIENTS = 10_000  # beyond so many those that are idle are looked for, ...
FORGET_S = 1.0  # ... but not more often
# What a command costs a client beside its message, and what it takes from the bound of all: it
# holds up the engine between two steps, or takes the interpreter from it.
_COSTS: tuple[tuple[type[Command], float, float], ...] = (
    (Submit, 0.0, 0.0),
    (Abort, 2.0, 2.0),
    (Withdraw, 2.0, 2.0),
    (Change, 20.0, 20.0),
    (GetSnapshot, 25.0, REFUSED),
    (GetKeptSnapshot, 25.0, REFUSED),
    (ReplayFrom, 25.0, REFUSED),
    (GetAudit, 10.0, REFUSED),
    (GetInfo, 5.0, 20.0),
)
_OTHER = 20.0, REFUSED  # what is no command


@dataclass(slots=True)
class _Bucket:
    rate: float
    burst: float
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.burst, self.level + (now_s - self.filled_s) * self.rate)
        self.filled_s = now_s


@dataclass(slots=True)
class Flood:
    """Refusals of one client that have not been reported."""

    count: int
    due_s: float


class RateLimiter:
    """One for a control socket.

    Attributes:
        num_limited: messages refused so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_limited = 0
        self._clock = clock
        self._clients: dict[bytes, _Bucket] = {}
        self._floods: dict[bytes, Flood] = {}
        self._is_paused = False
        self._next_forget_s = clock()
        self._total = _Bucket(TOTAL_RATE, TOTAL_BURST, TOTAL_BURST, clock())

    def admit(self, client: bytes, num_bytes: int) -> bool:
        """Take a message of so many bytes; False when the client has had its share."""
        now_s = self._clock()
        bucket = self._bucket(client, now_s)
        bucket.fill(now_s)
        cost = MESSAGE + num_bytes / BYTES_PER_UNIT
        self._total.fill(now_s)
        self._total.level -= cost
        if bucket.level < cost:
            self._total.level -= REFUSED
            self.num_limited += 1
            flood = self._floods.setdefault(client, Flood(0, now_s + FIRST_REPORT_S))
            flood.count += 1
            return False
        bucket.level -= cost
        return True

    def charge(self, client: bytes, command: Command | None) -> None:
        """What a command costs beside its message. The client may run into debt by it.

        Args:
            command: None for a message that is no command.
        """
        costs = (each[1:] for each in _COSTS if isinstance(command, each[0]))
        of_client, of_all = next(costs, _OTHER)
        self._bucket(client, self._clock()).level -= of_client
        self._total.level -= of_all

    def charge_text(self, client: bytes, num_chars: int) -> None:
        """What it costs to tokenise a prompt on the control thread."""
        self._bucket(client, self._clock()).level -= num_chars / CLIENT_CHARS
        self._total.level -= num_chars / TOTAL_CHARS

    def wait_s(self, client: bytes) -> float:
        """Until the client may send again."""
        bucket = self._bucket(client, self._clock())
        return max(0.0, (1.0 - bucket.level) / bucket.rate)

    def pause_s(self) -> float:
        """For how long nothing is to be read from anybody."""
        total = self._total
        total.fill(self._clock())
        enough = total.rate * PAUSE_S if self._is_paused else 0.0
        self._is_paused = total.level < enough
        return (total.rate * PAUSE_S - total.level) / total.rate if self._is_paused else 0.0

    def floods(self) -> list[tuple[bytes, int]]:
        """Clients that were refused, and how often since the last report."""
        if not self._floods:
            return []
        now_s = self._clock()
        reported = []
        for client, flood in list(self._floods.items()):
            if now_s < flood.due_s:
                continue
            if flood.count:
                reported.append((client, flood.count))
                self._floods[client] = Flood(0, now_s + REPORT_S)
            else:
                del self._floods[client]  # it is over
        return reported

    @property
    def next_report_s(self) -> float | None:
        """Seconds until `floods` has something to do, None when it has nothing."""
        if not self._floods:
            return None
        return max(0.0, min(flood.due_s for flood in self._floods.values()) - self._clock())

    def _bucket(self, client: bytes, now_s: float) -> _Bucket:
        bucket = self._clients.get(client)
        if bucket is None:
            if len(self._clients) >= MAX_CLIENTS and now_s >= self._next_forget_s:
                self._next_forget_s = now_s + FORGET_S
                self._forget_idle(now_s)
            bucket = _Bucket(CLIENT_RATE, CLIENT_BURST, CLIENT_BURST, now_s)
            self._clients[client] = bucket
        return bucket

    def _forget_idle(self, now_s: float) -> None:
        """A full bucket is as good as a new one."""
        for client, bucket in list(self._clients.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.burst:
                del self._clients[client]
