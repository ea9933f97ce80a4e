"""What strangers can do to the HTTP port: memory of its process, the answers, who else waits.

The demo is served over HTTP. Attacks come one after another, from one address: heads that are too
long or have too many lines, heads that never end, connections that are silent or slow. For each it
prints what was answered, the memory that the HTTP process had at most, and how long a good client
waited for `/health` meanwhile. Ends with 1 where a good client got no answer, memory grew by more
than 64 MB, or a connection that never sent a head was still open after 15 s.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

BEGIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
MOST_GROWTH_MB = 64.0
MOST_OPEN_S = 15.0
Connections = list[socket.socket]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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


class Attacked:
    """The HTTP process, and a well-behaved client of it."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self.port = port
        self._process = process
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5)

    @property
    def resident_mb(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    def wait_s(self) -> float:
        """How long a well-behaved client waits."""
        began_s = time.monotonic()
        self._client.get("/health").raise_for_status()
        return time.monotonic() - began_s


def held(attacked: Attacked, name: str, connections: Connections, wait_s: float) -> bool:
    """Print the result of an attack; return whether all its connections were answered or closed."""
    answers: list[str] = ["open"] * len(connections)
    most_mb = longest_s = 0.0
    until_s = time.monotonic() + wait_s
    while "open" in answers and time.monotonic() < until_s:
        answers = [
            answer(each) if was == "open" else was
            for each, was in zip(connections, answers, strict=True)
        ]
        longest_s = max(longest_s, attacked.wait_s())
        most_mb = max(most_mb, attacked.resident_mb)
        time.sleep(0.1)
    for each in connections:
        each.close()
    told = ", ".join(f"{number} {what}" for what, number in Counter(answers).items())
    print(f"{name:<38} {most_mb:>6.0f} MB {longest_s * 1e3:>8.0f} ms  {told}", flush=True)
    return "open" not in answers


def attacks(port: int) -> Iterator[tuple[str, Connections]]:
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


@contextlib.contextmanager
def serving() -> Iterator[Attacked]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        command = [str(Path(sys.executable).with_name("stepscope")), "serve", "--model", "demo"]
        command += ["--endpoint", f"ipc://{folder}/engine", "--http", f"127.0.0.1:{port}"]
        engine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url, until_s = f"http://127.0.0.1:{port}/health", time.monotonic() + 30
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(url).is_success:
                        break
                if time.monotonic() > until_s:
                    raise SystemExit("the server does not answer")
                time.sleep(0.2)
            yield Attacked(port, listening(engine.pid, port))
        finally:
            engine.terminate()
            engine.wait()


def listening(pid: int, port: int) -> psutil.Process:
    """The engine's process that listens on the port."""
    for process in psutil.Process(pid).children(recursive=True):
        for each in process.net_connections():
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                return process
    raise SystemExit("no process of the engine's listens")


def main() -> int:
    with serving() as attacked:
        at_rest_mb = attacked.resident_mb
        print(f"at rest {at_rest_mb:.0f} MB, /health in {attacked.wait_s() * 1e3:.0f} ms")
        print(f"{'attack':<38} {'memory':>9} {'good client':>11}  answers")
        is_good, most_mb = True, at_rest_mb
        for name, connections in attacks(attacked.port):
            most_mb = max(most_mb, attacked.resident_mb)
            is_good &= held(attacked, name, connections, MOST_OPEN_S)
        most_mb = max(most_mb, attacked.resident_mb)
    print(f"at most {most_mb - at_rest_mb:+.0f} MB")
    return 0 if is_good and most_mb - at_rest_mb <= MOST_GROWTH_MB else 1


if __name__ == "__main__":
    sys.exit(main())
