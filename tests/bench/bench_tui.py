"""What the dashboard costs, in a real pseudo-terminal of 200x60, against an engine of 64 requests.

    python tests/bench/bench_tui.py [--recording FILE]

The engine is another process with real sockets; the dashboard is `stepscope top`, receiving and
reducing included. Processor time comes from the operating system. A recording
(`bench_recording.py --steps 1000000 --file FILE` makes one) is opened and sought through as well.
Not a test: others use this machine too.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median_high

import psutil
from common import parser, percentile

from stepscope.recordings.file.reader import Recording
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.views.view import ZOOMS
from tests.support.screens.pty_process import PtyProcess

QUIET_S = 0.08  # after a picture, before the next key
SAME_S = 0.01  # between two pieces of a picture
SETTLE_S = 1.5
SECONDS = 8.0  # of a measurement
NUM_MEMORY_STEPS = 100_000
BADGE = "LIVE|REPLAY"
START_END = "elsewhere"  # the last section of the start screen
PICTURE_BYTES = 2_000  # a screen that has changed is more
NUM_LOST = r"  gap (?:\x1b\[[\d;]*m)*([\d,]+)"  # in the header of a screen


# A dashboard, measured from outside its process, and its engine


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


@contextlib.contextmanager
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


# Measurements


def main() -> None:
    given = parser(__doc__, recording=Path).parse_args()
    print(f"{'200x60':<44} {'measured':>28}  {'at most':>9}")
    with tempfile.TemporaryDirectory(prefix="sst") as name:
        folder = Path(name)
        live(folder)
        in_memory(folder)
        first_picture("stepscope", shows=START_END)
        first_picture("stepscope replay", "replay", "freeze")
        first_picture("stepscope top", "top", sockets=folder)
    if given.recording is not None:
        recording(given.recording)


def row(what: str, measured: str, value: float, aim: str) -> None:
    """Print a figure, in words and as the number that the aim bounds."""
    held = "held" if value <= float(aim.split()[0].replace(",", "")) else "NOT HELD"
    print(f"{what:<44} {measured:>28}  {aim:>9}  {held}", flush=True)


def answers(what: str, times_ms: list[float]) -> None:
    middle, most = median_high(times_ms), percentile(times_ms, 0.95)
    row(what, f"{middle:.0f}, p95 {most:.0f} ms", middle, "50 ms")


def live(folder: Path) -> None:
    screens = [BY_ID[f"screen_{page}"].keys[0] for page in ("step", "live", "latency", "live")]
    with engine(folder) as endpoint, top(endpoint) as terminal:
        cpu, kilobytes = terminal.measure(SECONDS)
        row("main screen, 50 steps/s: core", f"{cpu:.1f} %", cpu, "8 %")
        row("  written", f"{kilobytes:.0f} KB/s", kilobytes, "350 KB/s")
        times_ms = [terminal.answer_ms(key, PICTURE_BYTES) for key in screens * 5]
        answers("key press to another screen", times_ms)
    with engine(folder, 5_000.0) as endpoint, top(endpoint) as terminal:
        cpu, _ = terminal.measure(SECONDS)
        for key in screens[:2]:
            terminal.answer_ms(key, PICTURE_BYTES)
        _, found = terminal.wait_for(NUM_LOST)
        num_lost = int(found[1].replace(b",", b""))
        what = "receiving 5,000 steps/s while drawing"
        row(what, f"{num_lost} lost, {cpu:.0f} % of a core", num_lost, "0 lost")


def in_memory(folder: Path) -> None:
    """A session of 100,000 steps, and jumps through it."""
    with engine(folder, burst=NUM_MEMORY_STEPS) as endpoint, top(endpoint) as terminal:
        terminal.wait_for(r"10\d,\d\d\d", timeout_s=300)  # the burst has been received
        time.sleep(SETTLE_S)
        megabytes = terminal.process.memory_info().rss / 1e6
        row("memory, 100,000 steps", f"{megabytes:.0f} MB", megabytes, "300 MB")
        terminal.type(" ")
        time.sleep(0.5)
        jumps(terminal, "jump to any step in memory", 1_000, NUM_MEMORY_STEPS)


def jumps(terminal: Terminal, what: str, first: int, last: int, cold: Path | None = None) -> None:
    """Go to 25 steps at each of three zooms by typing their numbers."""
    rng = random.Random(3)
    for zoom in (1, 5, 50):
        if cold is not None:
            forget(cold)
        times_ms = []
        for _ in range(25):
            step = rng.randrange(first, last)
            terminal.type(f"g{step}")
            time.sleep(0.35)
            times_ms.append(terminal.answer_ms("\r", shows=f"{step:,}"))
        answers(f"{what}, zoom {zoom}", times_ms)
        terminal.type("x" * (ZOOMS.index(5) - ZOOMS.index(1) if zoom == 1 else 3))
        time.sleep(1.0)


def first_picture(
    what: str,
    *arguments: str,
    shows: str = BADGE,
    tries: int = 5,
    sockets: Path | None = None,
    cold: Path | None = None,
) -> None:
    """From the command to a picture; the least of some tries, since the machine may be shared.

    Args:
        sockets: a folder for an engine that runs beside each try.
        cold: a file that is read from the disk each time.
    """
    begun = []
    for _ in range(tries):
        with contextlib.ExitStack() as stack:
            if cold is not None:
                forget(cold)
            more = [stack.enter_context(engine(sockets))] if sockets is not None else []
            terminal = stack.enter_context(Terminal(*arguments, *more))
            begun.append((terminal.wait_for(shows)[0], cpu_s(terminal.process)))
    wall_s, spent_s = map(min, zip(*begun, strict=True))
    row(f"{what}: first picture", f"{wall_s:.2f} s, CPU {spent_s:.2f} s", wall_s, "1 s")


def recording(path: Path) -> None:
    with Recording(path) as opened:
        first, last = opened.first_step or 0, opened.last_step or 0
    print(f"\n{path.name}, {last - first + 1:,} steps")
    files = {"cold": path, "warm": None}
    for name, cold in files.items():
        middle = str((first + last) // 2)
        first_picture(f"{name} file", "replay", str(path), "--at", middle, tries=3, cold=cold)
    for name, cold in files.items():
        with Terminal("replay", str(path), "--at", str(last)) as terminal:
            terminal.wait_for(BADGE)
            time.sleep(SETTLE_S)
            jumps(terminal, f"seek, {name}", first, last, cold)


def forget(path: Path) -> None:
    """Make the operating system read the file from the disk again."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def top(endpoint: str) -> Iterator[Terminal]:
    with Terminal("top", endpoint) as terminal:
        terminal.wait_for(BADGE)
        time.sleep(SETTLE_S)
        yield terminal


if __name__ == "__main__":
    main()
