"""`Backlog`: what libzmq holds for connections that misuse it, and an end to it.

libzmq hands a message over whole, however many frames it has: `ZMQ_MAXMSGSIZE` bounds one frame,
the high-water mark whole messages, and who sends frames without end fills the memory (measured with
4.3.5: 262 MB of 262 MB sent, with frames of at most 1 MB and a mark of 64). So does who asks for
much and reads nothing. Only the kernel knows how much came on a connection, and how much the other
side has taken, so that is held against what we took and sent. Belongs to the control thread.

This is for TCP on Linux. There is no such count for an `ipc` address, which only this user reaches,
who can end the engine more easily.
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

MAX_HELD_BYTES = 96 * 1024 * 1024  # of one connection: more than its queue of commands can be
MAX_TOTAL_BYTES = 256 * 1024 * 1024  # of all connections
GROWN_BYTES = 8 * 1024 * 1024  # by which the process grows until it is looked again, ...
LOOK_S, ALWAYS_S = 0.25, 60.0  # ... but not more often, and not more seldom
FORGIVEN = 256  # bytes a second: heartbeats are no messages
_BYTES_ACKNOWLEDGED = 120  # where Linux has it in `struct tcp_info`, since 4.1; behind it what came
_TCP_INFO_BYTES = 256
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s
_STATM = Path("/proc/self/statm")
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(slots=True)
class _Account:
    """One connection."""

    addresses: tuple[object, object]
    forgiven: float = 0.0


def wire_bytes(num_bytes: int, *, is_encrypted: bool) -> int:
    """Bytes of a frame on the way (ZMTP 3: 23/ZMTP and 26/CURVEZMQ of rfc.zeromq.org)."""
    if is_encrypted:
        num_bytes += 33
    return num_bytes + (2 if num_bytes < 256 else 9)


class Backlog:
    """Ends connections that make this process hold too much.

    Args:
        addresses: ZeroMQ addresses that are listened on.
        taken: bytes of whole messages that were taken from the connection on a descriptor.
        sent: bytes that were sent on it.
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
        self._looked_s = clock()
        self._next_s = self._looked_s + LOOK_S
        self._resident_bytes = _resident_bytes() if self._ports else 0

    @property
    def wait_s(self) -> float | None:
        """Until `cut_off` is to be called again; None: never."""
        return max(0.0, self._next_s - self._clock()) if self._ports else None

    def cut_off(self) -> list[int]:
        """End what holds too much, if it is time to look; gives how many bytes each held."""
        now_s = self._clock()
        if not self._ports or now_s < self._next_s:
            return []
        self._next_s = now_s + LOOK_S
        try:
            return self._look_if_grown(now_s)
        except OSError as error:  # out of descriptors, for example: the next look may succeed
            log.debug("cannot look at the connections: %s", error)
            return []

    def _look_if_grown(self, now_s: float) -> list[int]:
        resident_bytes = _resident_bytes()
        has_grown = resident_bytes > self._resident_bytes + GROWN_BYTES
        if not has_grown and now_s < self._looked_s + ALWAYS_S:
            self._resident_bytes = min(self._resident_bytes, resident_bytes)
            return []
        self._resident_bytes = resident_bytes
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        return self._look(passed_s)

    def _look(self, passed_s: float) -> list[int]:
        with contextlib.ExitStack() as stack:
            held: list[tuple[int, socket.socket]] = []
            accounts: dict[int, _Account] = {}
            for descriptor, connection in self._connections(stack):
                addresses = connection.getsockname(), connection.getpeername()
                account = self._accounts.get(descriptor)
                if account is None or account.addresses != addresses:
                    account = _Account(addresses)
                accounts[descriptor] = account
                account.forgiven += FORGIVEN * passed_s
                received, acknowledged = _num_bytes(connection)
                unfinished = received - self._taken(descriptor) - round(account.forgiven)
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
                    # Reset when libzmq closes it: a sender may wait for minutes otherwise.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    connection.shutdown(socket.SHUT_RDWR)
                total -= num_bytes
                ended.append(num_bytes)
            return ended

    def _connections(self, stack: contextlib.ExitStack) -> Iterator[tuple[int, socket.socket]]:
        """Those on our ports, under descriptors of their own that `stack` closes."""
        copies: set[int] = set()
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            # A number that was free again after the listing (its own, for one) may name a copy.
            if descriptor in copies:
                continue
            with contextlib.suppress(OSError):  # it was closed meanwhile, or has no other end
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
    """That came, and that the other side has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_ACKNOWLEDGED + 16:
        return 0, 1 << 62  # an older kernel
    acknowledged, received = struct.unpack_from("QQ", info, _BYTES_ACKNOWLEDGED)
    return received, acknowledged


def _resident_bytes() -> int:
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
