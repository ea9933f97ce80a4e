"""`RateLimiter`: bounds the time that the control thread spends on clients; and open files.

There are two bounds (token buckets, as in RFC 2697):
- If a client is over the bound of one client, its commands are refused.
- If all clients together are over their bound, the thread reads nothing for a moment. Unread
  messages stay in the queue of their sender. libzmq reads from all connections in turn, so no
  client waits for the flood of another.

After such a pause several messages are read at once. Each time that the thread wakes, it takes
Python's interpreter lock from the engine's thread, so it should wake seldom.
"""

import contextlib
import errno
import resource
import time
from collections.abc import Callable

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
MAX_CLIENTS = 10_000  # with more clients than this, idle ones are forgotten
# Units of a command in addition to its message: for the client, and for the bound of all. It
# holds up the engine between two steps, or takes the interpreter from it.
_COSTS: tuple[tuple[type[commands.Command], float, float], ...] = (
    (commands.Submit, 0.0, 0.0),
    (commands.Abort, 2.0, 2.0),
    (commands.Change, 20.0, 20.0),
    (commands.GetSnapshot, 25.0, REFUSED),
    (commands.GetKeptSnapshot, 25.0, REFUSED),
    (commands.ReplayFrom, 25.0, REFUSED),
    (commands.GetAudit, 10.0, REFUSED),
    (commands.GetInfo, 5.0, 20.0),
)
_OTHER = 20.0, REFUSED  # for a message that is no command


class TokenBucket:
    """An allowance that fills at `rate` a second up to `burst`, and may be overdrawn."""

    __slots__ = ("burst", "filled_s", "level", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self.burst = self.level = burst
        self.filled_s = now_s

    def fill(self, now_s: float) -> None:
        self.level = min(self.burst, self.level + (now_s - self.filled_s) * self.rate)
        self.filled_s = now_s

    def spend(self, cost: float, now_s: float) -> None:
        self.fill(now_s)
        self.level -= cost

    def wait_s(self, level: float) -> float:
        """Seconds from the last `fill` until it holds this much."""
        return max(0.0, (level - self.level) / self.rate)


class RateLimiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: dict[bytes, TokenBucket] = {}
        self._is_paused = False
        self._total = TokenBucket(TOTAL_RATE, TOTAL_BURST, clock())

    def admit(self, client: bytes, num_bytes: int) -> bool:
        """Charge a client for a message of `num_bytes`. False if the client is over its limit."""
        bucket, cost = self._bucket(client), MESSAGE + num_bytes / BYTES_PER_UNIT
        is_over = bucket.level < cost
        self._total.spend(cost + (REFUSED if is_over else 0.0), self._clock())
        if not is_over:
            bucket.level -= cost
        return not is_over

    def charge(self, client: bytes, command: commands.Command | None) -> None:
        """Charge a client for a command (None: a message that is none), maybe into debt."""
        costs = (each[1:] for each in _COSTS if isinstance(command, each[0]))
        of_client, of_all = next(costs, _OTHER)
        self._bucket(client).level -= of_client
        self._total.level -= of_all

    def charge_text(self, client: bytes, num_chars: int) -> None:
        """Charge a client for a prompt that is tokenised on the control thread."""
        self._bucket(client).level -= num_chars / CLIENT_CHARS
        self._total.level -= num_chars / TOTAL_CHARS

    def charge_bytes(self, client: bytes, num_bytes: int) -> None:
        """Charge a client for a large answer. Bytes do not count for the bound of all clients."""
        self._bucket(client).level -= num_bytes / ANSWER_BYTES

    def wait_s(self, client: bytes) -> float:
        """Seconds until the client may send again."""
        return self._bucket(client).wait_s(1.0)

    def pause_s(self) -> float:
        """Seconds during which to read nothing from any client."""
        total = self._total
        total.fill(self._clock())
        left_s = total.wait_s(total.rate * PAUSE_S)
        self._is_paused = left_s > (0.0 if self._is_paused else PAUSE_S)
        return left_s if self._is_paused else 0.0

    def _bucket(self, client: bytes) -> TokenBucket:
        now_s, bucket = self._clock(), self._clients.get(client)
        if bucket is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._forget_idle(now_s)
            bucket = self._clients[client] = TokenBucket(CLIENT_RATE, CLIENT_BURST, now_s)
        bucket.fill(now_s)
        return bucket

    def _forget_idle(self, now_s: float) -> None:
        for client, bucket in list(self._clients.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.burst:
                del self._clients[client]


_MANY = 65_536  # the limit to set if the system has none


def allow_many_files() -> int:
    """Raise the soft limit, often a thousand, as far as this user may. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


def is_out_of_files(error: OSError) -> bool:
    """Whether an error means that the limit of open files was reached, not that a file is bad."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
