"""`RateLimiter`: bounds the time that the control thread spends on clients. Belongs to that thread.

There are two bounds (token buckets, as in RFC 2697):
- If a client is over the bound of one client, its commands are refused.
- If all clients together are over their bound, the thread reads nothing for a moment. Unread
  messages stay in the queue of their sender. libzmq reads from all connections in turn, so no
  client waits for the flood of another.

After such a pause several messages are read at once. Each time that the thread wakes, it takes
Python's interpreter lock from the engine's thread, so it should wake seldom.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.engine.protocol import commands

CLIENT_RATE, CLIENT_BURST = 1_000.0, 2_000.0  # units a second, units at once
TOTAL_RATE, TOTAL_BURST = 8_000.0, 16_000.0
MESSAGE = 0.2  # units for any message, plus its bytes
BYTES_PER_UNIT = 65_536
ANSWER_BYTES = 4_096  # bytes of a large answer per unit: 4 MB a second for one client
# Characters per unit, for text that is tokenised on the control thread, which manages 1 to 2
# million a second: half a million a second for one client (the HTTP server is one, too), and as
# many for all together.
CLIENT_CHARS, TOTAL_CHARS = 512, 64
REFUSED = 32.0  # units that a refused message takes from the bound of all clients
PAUSE_S = 0.02  # allowance that must build up before messages are read again
FIRST_REPORT_S, REPORT_S = 0.5, 5.0  # how soon, and how often, a client's flood is reported
MAX_CLIENTS = 10_000  # with more clients than this, idle ones are forgotten, ...
FORGET_S = 1.0  # ... at this interval at the least
# Units of a command in addition to its message: for the client, and for the bound of all. It
# holds up the engine between two steps, or takes the interpreter from it.
_COSTS: tuple[tuple[type[commands.Command], float, float], ...] = (
    (commands.Submit, 0.0, 0.0),
    (commands.Abort, 2.0, 2.0),
    (commands.Withdraw, 2.0, 2.0),
    (commands.Change, 20.0, 20.0),
    (commands.GetSnapshot, 25.0, REFUSED),
    (commands.GetKeptSnapshot, 25.0, REFUSED),
    (commands.ReplayFrom, 25.0, REFUSED),
    (commands.GetAudit, 10.0, REFUSED),
    (commands.GetInfo, 5.0, 20.0),
)
_OTHER = 20.0, REFUSED  # for a message that is no command


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
    """Refusals of one client that have not been reported to the audit trail."""

    count: int
    due_s: float


class RateLimiter:
    """Rate limits of one control socket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_limited = 0
        self._clock = clock
        self._clients: dict[bytes, _Bucket] = {}
        self._floods: dict[bytes, Flood] = {}
        self._is_paused = False
        self._next_forget_s = clock()
        self._total = _Bucket(TOTAL_RATE, TOTAL_BURST, TOTAL_BURST, clock())

    def admit(self, client: bytes, num_bytes: int) -> bool:
        """Charge a client for a message of `num_bytes`. False if the client is over its limit."""
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

    def charge(self, client: bytes, command: commands.Command | None) -> None:
        """Charge a client for a command (None: a message that is none), maybe into debt."""
        costs = (each[1:] for each in _COSTS if isinstance(command, each[0]))
        of_client, of_all = next(costs, _OTHER)
        self._bucket(client, self._clock()).level -= of_client
        self._total.level -= of_all

    def charge_text(self, client: bytes, num_chars: int) -> None:
        """Charge a client for a prompt that is tokenised on the control thread."""
        self._bucket(client, self._clock()).level -= num_chars / CLIENT_CHARS
        self._total.level -= num_chars / TOTAL_CHARS

    def charge_bytes(self, client: bytes, num_bytes: int) -> None:
        """Charge a client for a large answer. Bytes do not count for the bound of all clients."""
        self._bucket(client, self._clock()).level -= num_bytes / ANSWER_BYTES

    def wait_s(self, client: bytes) -> float:
        """Seconds until the client may send again."""
        bucket = self._bucket(client, self._clock())
        return max(0.0, (1.0 - bucket.level) / bucket.rate)

    def pause_s(self) -> float:
        """Seconds during which to read nothing from any client."""
        total = self._total
        total.fill(self._clock())
        enough = total.rate * PAUSE_S if self._is_paused else 0.0
        self._is_paused = total.level < enough
        return (total.rate * PAUSE_S - total.level) / total.rate if self._is_paused else 0.0

    def floods(self) -> list[tuple[bytes, int]]:
        """Return the clients to report: (client, number of refusals since its last report)."""
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
                del self._floods[client]  # no refusal since the last report
        return reported

    @property
    def next_report_s(self) -> float | None:
        """Seconds until the next call of `floods`; None if no client was refused."""
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
        for client, bucket in list(self._clients.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.burst:
                del self._clients[client]
