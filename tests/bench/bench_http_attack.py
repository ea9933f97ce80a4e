"""What strangers can do to the HTTP port: memory of its process, the answers, who else waits.

The demo is served over HTTP. Attacks come one after another, from one address: heads that are too
long or have too many lines, heads that never end, connections that are silent or slow. For each it
prints what was answered, the memory that the HTTP process had at most, and how long a good client
waited for `/health` meanwhile. Ends with 1 where a good client got no answer, memory grew by more
than 64 MB, or a connection that never sent a head was still open after 15 s.
"""

import contextlib
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator

import httpx
from served import serving

BEGIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
MOST_GROWTH_MB = 64.0
MOST_OPEN_S = 15.0


def send(port: int, payload: bytes) -> socket.socket:
    """A connection on which as much was sent as the server accepted."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=2)
    with contextlib.suppress(OSError):  # it hung up
        connection.sendall(payload)
    connection.settimeout(0.0)
    return connection


def answer(connection: socket.socket) -> str:
    """The status received, "closed" without one, or "open"."""
    try:
        received = connection.recv(4096)
    except BlockingIOError:
        return "open"
    except OSError:
        return "closed"
    return received.split(b" ")[1].decode() if received.startswith(b"HTTP/") else "closed"


def attacks(port: int) -> Iterator[tuple[str, list[socket.socket]]]:
    long_line = BEGIN + b"x: " + b"a" * 5_000_000 + b"\r\n\r\n"
    yield "a head of 5 MB", [send(port, long_line)]
    yield "a head of 500,000 lines", [send(port, BEGIN + b"x: y\r\n" * 500_000 + b"\r\n")]
    unfinished = BEGIN + b"x: " + b"a" * 4_000_000
    yield "50 unfinished heads of 4 MB", [send(port, unfinished) for _ in range(50)]
    in_lines = BEGIN + b"x: y\r\n" * 700_000
    yield "50 of 4 MB in 700,000 lines", [send(port, in_lines) for _ in range(50)]
    yield "200 silent connections", [send(port, b"") for _ in range(200)]
    yield "200 with 30 KB of a head", [send(port, unfinished[:30_000]) for _ in range(200)]
    yield "a host that is none", [send(port, b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n")]


def main() -> int:
    with serving("--http", "0") as server, httpx.Client(base_url=server.url, timeout=5) as client:
        process, port = server.http_process, int(server.url.rpartition(":")[2])

        def resident_mb() -> float:
            return float(process.memory_info().rss) / 2**20

        def wait_s() -> float:
            """How long a well-behaved client waits."""
            began_s = time.monotonic()
            client.get("/health").raise_for_status()
            return time.monotonic() - began_s

        at_rest_mb = most_mb = resident_mb()
        print(f"at rest {at_rest_mb:.0f} MB, /health in {wait_s() * 1e3:.0f} ms")
        print(f"{'attack':<38} {'memory':>9} {'good client':>11}  answers")
        all_closed = True
        for name, connections in attacks(port):
            answers = ["open"] * len(connections)
            peak_mb, longest_s, until_s = resident_mb(), 0.0, time.monotonic() + MOST_OPEN_S
            while "open" in answers and time.monotonic() < until_s:
                answers = [
                    answer(each) if was == "open" else was
                    for each, was in zip(connections, answers, strict=True)
                ]
                longest_s, peak_mb = max(longest_s, wait_s()), max(peak_mb, resident_mb())
                time.sleep(0.1)
            for each in connections:
                each.close()
            told = ", ".join(f"{number} {what}" for what, number in Counter(answers).items())
            print(f"{name:<38} {peak_mb:>6.0f} MB {longest_s * 1e3:>8.0f} ms  {told}", flush=True)
            all_closed &= "open" not in answers
            most_mb = max(most_mb, peak_mb)
    print(f"at most {most_mb - at_rest_mb:+.0f} MB")
    return 0 if all_closed and most_mb - at_rest_mb <= MOST_GROWTH_MB else 1


if __name__ == "__main__":
    sys.exit(main())
