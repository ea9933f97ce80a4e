"""`Backlog`: ends connections for which libzmq holds too many bytes in memory.

Runs on the control thread. Two things make libzmq hold many bytes for one client:
- Frames of one message without end. libzmq passes a message on only when it is complete.
  `ZMQ_MAXMSGSIZE` bounds one frame, and the high-water mark counts whole messages, so neither helps
  (measured with 4.3.5: 262 MB of 262 MB sent, with frames of at most 1 MB and a mark of 64).
- Many requests for replies that the client does not read.

Only the kernel counts the bytes that came on a connection, and the bytes that the other side has
acknowledged. We compare them with the bytes of the messages that we took and sent.

This works for TCP on Linux. For an `ipc` address there is no such count; only this user can reach
it, who has easier ways to end the engine.
"""

import contextlib
import logging
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("stepscope.engine")

MAX_HELD_BYTES = 96 * 1024 * 1024  # for one connection: more than its queue of commands can be
MAX_TOTAL_BYTES = 256 * 1024 * 1024  # for all connections
GROWN_BYTES = 8 * 1024 * 1024  # growth of the process after which connections are checked
MIN_CHECK_S, MAX_CHECK_S = 0.25, 60.0  # shortest and longest time between two checks
FREE_BYTES = 256  # in a second; they do not count, because heartbeats are no messages
# Offset in Linux's `struct tcp_info` (since 4.1) of the bytes acknowledged, then those received.
_BYTES_ACKNOWLEDGED = 120
_TCP_INFO_BYTES = 256
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s
_STATM = Path("/proc/self/statm")
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(slots=True)
class _Account:
    """One connection: its two addresses, and how many received bytes are not held against it."""

    addresses: tuple[object, object]
    free_bytes: float = 0.0


def wire_bytes(num_bytes: int, *, is_encrypted: bool) -> int:
    """Return a frame's size on the wire (ZMTP 3: 23/ZMTP and 26/CURVEZMQ of rfc.zeromq.org)."""
    if is_encrypted:
        num_bytes += 33
    return num_bytes + (2 if num_bytes < 256 else 9)


class Backlog:
    """Ends connections that make this process hold too many bytes.

    Args:
        addresses: ZeroMQ addresses on which this process listens.
        taken: returns, for a file descriptor, the bytes of the whole messages that came on it.
        sent: returns, for a file descriptor, the bytes that we sent on it.
        clock: seconds.
    """

    def __init__(
        self,
        addresses: list[str],
        taken: Callable[[int], int],
        sent: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ports = {int(a.rpartition(":")[2]) for a in addresses if a.startswith("tcp://")}
        if not sys.platform.startswith("linux"):
            self._ports.clear()
        self._taken = taken
        self._sent = sent
        self._clock = clock
        self._accounts: dict[int, _Account] = {}
        self._checked_s = clock()
        self._next_s = self._checked_s + MIN_CHECK_S
        self._resident_bytes = _resident_bytes() if self._ports else 0

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next call of `cut_off`; None if it is never needed."""
        return max(0.0, self._next_s - self._clock()) if self._ports else None

    def cut_off(self) -> list[int]:
        """End connections that hold too many bytes, if a check is due.

        Returns:
            How many bytes each ended connection held.
        """
        now_s = self._clock()
        if not self._ports or now_s < self._next_s:
            return []
        self._next_s = now_s + MIN_CHECK_S
        try:
            return self._check_if_grown(now_s)
        except OSError as error:  # out of descriptors, for example: the next look may succeed
            log.debug("cannot look at the connections: %s", error)
            return []

    def _check_if_grown(self, now_s: float) -> list[int]:
        resident_bytes = _resident_bytes()
        has_grown = resident_bytes > self._resident_bytes + GROWN_BYTES
        if not has_grown and now_s < self._checked_s + MAX_CHECK_S:
            self._resident_bytes = min(self._resident_bytes, resident_bytes)
            return []
        self._resident_bytes = resident_bytes
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        return self._check(passed_s)

    def _check(self, passed_s: float) -> list[int]:
        with contextlib.ExitStack() as stack:
            held: list[tuple[int, socket.socket]] = []
            accounts: dict[int, _Account] = {}
            for descriptor, connection in self._connections(stack):
                addresses = connection.getsockname(), connection.getpeername()
                account = self._accounts.get(descriptor)
                if account is None or account.addresses != addresses:
                    account = _Account(addresses)
                accounts[descriptor] = account
                account.free_bytes += FREE_BYTES * passed_s
                received, acknowledged = _num_bytes(connection)
                unfinished = received - self._taken(descriptor) - round(account.free_bytes)
                unread = self._sent(descriptor) - acknowledged
                held.append((max(0, unfinished) + max(0, unread), connection))
            self._accounts = accounts
            held.sort(key=lambda each: each[0], reverse=True)
            total = sum(num_bytes for num_bytes, _ in held)
            ended = []
            for num_bytes, connection in held:
                if num_bytes <= MAX_HELD_BYTES and total <= MAX_TOTAL_BYTES:
                    break
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    # So that closing it sends a reset: otherwise the sender may wait for minutes.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    connection.shutdown(socket.SHUT_RDWR)
                total -= num_bytes
                ended.append(num_bytes)
            return ended

    def _connections(self, stack: contextlib.ExitStack) -> Iterator[tuple[int, socket.socket]]:
        """Yield the connections on our ports: file descriptor, and a socket on a copy of it.

        `stack` closes the copies.
        """
        copies: set[int] = set()
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            # A descriptor from the listing may have been closed since, and its number reused for
            # one of our copies.
            if descriptor in copies:
                continue
            with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
                if not stat.S_ISSOCK(os.stat(descriptor).st_mode):
                    continue
                copy = os.dup(descriptor)
                try:
                    connection = socket.socket(fileno=copy)
                except OSError:
                    os.close(copy)
                    continue
                copies.add(copy)
                stack.callback(connection.close)
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    if connection.getsockname()[1] in self._ports:
                        yield descriptor, connection


def _num_bytes(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes received on a connection, and those that the other side acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_ACKNOWLEDGED + 16:
        return 0, 1 << 62  # an older kernel
    acknowledged, received = struct.unpack_from("QQ", info, _BYTES_ACKNOWLEDGED)
    return received, acknowledged


def _resident_bytes() -> int:
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
