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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median_high

from common import parser, percentile
from dashboard_terminal import Terminal, cpu_s, engine

from stepscope.recordings.file.reader import Recording
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.views.view import ZOOMS

SETTLE_S = 1.5
SECONDS = 8.0  # of a measurement
NUM_MEMORY_STEPS = 100_000
BADGE = "LIVE|REPLAY"
START_END = "elsewhere"  # the last section of the start screen
PICTURE_BYTES = 2_000  # a screen that has changed is more
NUM_LOST = r"  gap (?:\x1b\[[\d;]*m)*([\d,]+)"  # in the header of a screen


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
