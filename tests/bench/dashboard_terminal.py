"""A dashboard in a pseudo-terminal of its own process, measured from outside. Not a test."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common  # noqa: F401 - the repository is on the path
import psutil

from tests.support.screens.pty_process import PtyProcess

QUIET_S = 0.08  # after a picture, before the next key
SAME_S = 0.01  # between two pieces of a picture


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process so far, to about ten milliseconds."""
    return float(sum(process.cpu_times()[:2]))


class Terminal:
    """Starts `stepscope ARGUMENTS` at 200x60 and plays the operator."""

    def __init__(self, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("stepscope")), *arguments]
        shows = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "STEPSCOPE_CONFIG": "none"}
        environment = os.environ | shows
        for name in ("NO_COLOR", "SSH_CONNECTION"):
            environment.pop(name, None)
        self.started_s = time.monotonic()
        self._child = PtyProcess(command, rows=60, columns=200, env=environment)
        self.process = psutil.Process(self._child.pid)
        self._pieces: list[tuple[float, int]] = []  # when it came, and its bytes
        self._has_ended = False
        self._text = b""  # the last of what was written
        self._seen = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def _read(self) -> None:
        while not self._has_ended:
            try:
                piece = self._child.read()
            except EOFError:
                piece = b""
            with self._seen:
                self._has_ended = not piece
                self._pieces.append((time.monotonic(), len(piece)))
                self._text = (self._text + piece)[-200_000:]
                self._seen.notify_all()

    def _num_bytes(self, first_piece: int = 0) -> int:
        return sum(num_bytes for _, num_bytes in self._pieces[first_piece:])

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> tuple[float, re.Match[bytes]]:
        """Wait until a match was written; return the seconds since the start, and the match."""
        wanted = re.compile(pattern.encode())
        with self._seen:
            self._seen.wait_for(lambda: wanted.search(self._text) or self._has_ended, timeout_s)
            found = wanted.search(self._text)
            if not found or self._has_ended:
                end = self._text[-1000:].decode(errors="replace")
                raise TimeoutError(f"{pattern!r} never came: {end}")
            return time.monotonic() - self.started_s, found

    def type(self, keys: str) -> None:
        self._child.write(keys.encode())

    def answer_ms(self, keys: str, at_least: int = 0, shows: str = "") -> float:
        """From the last of some keys to the end of the resulting picture, in milliseconds.

        Args:
            at_least: bytes that such a picture has.
            shows: text that is new in it.
        """
        with self._seen:
            self._text = b""
            first, wanted = len(self._pieces), shows.encode()
        start_s = time.monotonic()
        self.type(keys)
        with self._seen:
            came = self._seen.wait_for(
                lambda: self._num_bytes(first) >= at_least and wanted in self._text, 5.0
            )
        if not came:
            raise TimeoutError(f"{keys!r} brought no new picture")
        done_s = self._pieces[-1][0]
        time.sleep(QUIET_S)
        for at_s, _ in self._pieces[first:]:
            if done_s < at_s <= done_s + SAME_S:  # the same picture still
                done_s = at_s
        return (done_s - start_s) * 1e3

    def measure(self, seconds: float) -> tuple[float, float]:
        """Processor time in per cent of a core, and kilobytes written a second."""
        before_s, bytes_before, start_s = cpu_s(self.process), self._num_bytes(), time.monotonic()
        time.sleep(seconds)
        spent_s, elapsed_s = cpu_s(self.process) - before_s, time.monotonic() - start_s
        return 100 * spent_s / elapsed_s, (self._num_bytes() - bytes_before) / 1000 / elapsed_s


@contextmanager
def engine(folder: Path, rate: float = 50.0, burst: int = 1_000) -> Iterator[str]:
    """The endpoint of a `fed_engine.py` process with 64 requests, its sockets in the folder."""
    endpoint = f"ipc://{folder}/{time.monotonic_ns()}"
    script = Path(__file__).with_name("fed_engine.py")
    options = ("--rate", str(rate), "--burst", str(burst))
    process = subprocess.Popen([sys.executable, str(script), endpoint, *options])
    try:
        while not Path(endpoint.removeprefix("ipc://")).exists():
            if process.poll() is not None:
                raise RuntimeError("the engine of the bench ended")
            time.sleep(0.05)
        yield endpoint
    finally:
        process.kill()
        process.wait()
