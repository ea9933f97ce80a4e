"""What the dashboard costs, in a real pseudo-terminal of 200x60, against an engine of 64 requests.

    python tests/bench/bench_tui.py [--recording FILE]

The engine is another process with real sockets; the dashboard is `stepscope top`, receiving and
reducing included. Processor time comes from the operating system. A recording
(`bench_recording.py --steps 1000000 --file FILE` makes one) is opened and sought through as well.
Not a test: others use this machine too.
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dashboard_terminal import Terminal, engine

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path)
    options = parser.parse_args()
    print(f"{'200x60':<44} {'measured':>28}  {'at most':>9}")
    with tempfile.TemporaryDirectory(prefix="sst") as name:
        folder = Path(name)
        live(folder)
        in_memory(folder)
        first_picture(folder, "stepscope", [], START_END)
        first_picture(folder, "stepscope replay", ["replay", "freeze"])
        first_picture(folder, "stepscope top", ["top"])
    if options.recording is not None:
        recording(options.recording)


def row(what: str, measured: str, value: float, aim: str) -> None:
    """Print a figure, in words and as the number that the aim bounds."""
    held = "held" if value <= float(aim.split()[0].replace(",", "")) else "NOT HELD"
    print(f"{what:<44} {measured:>28}  {aim:>9}  {held}", flush=True)


def live(folder: Path) -> None:
    screens = [BY_ID[f"screen_{page}"].keys[0] for page in ("step", "live", "latency", "live")]
    with engine(folder) as endpoint, top(endpoint) as terminal:
        cpu, kilobytes = terminal.measure(SECONDS)
        row("main screen, 50 steps/s: core", f"{cpu:.1f} %", cpu, "8 %")
        row("  written", f"{kilobytes:.0f} KB/s", kilobytes, "350 KB/s")
        times = [terminal.answer_ms(key, PICTURE_BYTES) for key in screens * 5]
        row("key press to another screen", middle_and_most(times), middle(times), "50 ms")
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
        times = []
        for _ in range(25):
            step = rng.randrange(first, last)
            terminal.type(f"g{step}")
            time.sleep(0.35)
            times.append(terminal.answer_ms("\r", shows=f"{step:,}"))
        row(f"{what}, zoom {zoom}", middle_and_most(times), middle(times), "50 ms")
        terminal.type("x" * (ZOOMS.index(5) - ZOOMS.index(1) if zoom == 1 else 3))
        time.sleep(1.0)


def first_picture(folder: Path, what: str, arguments: list[str], shows: str = BADGE) -> None:
    """From the command to a picture; the least of five, since the machine may be shared."""
    begun = []
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            more = []
            if arguments == ["top"]:
                more = [stack.enter_context(engine(folder))]
            terminal = stack.enter_context(Terminal(*arguments, *more))
            begun.append((terminal.wait_for(shows)[0], terminal.cpu_s))
    row(f"{what}: first picture", least(begun), min(begun)[0], "1 s")


def recording(path: Path) -> None:
    with Recording(path) as opened:
        first, last = opened.first_step or 0, opened.last_step or 0
    print(f"\n{path.name}, {last - first + 1:,} steps")
    for cold in ("cold", "warm"):
        begun = []
        for _ in range(3):
            if cold == "cold":
                forget(path)
            with Terminal("replay", str(path), "--at", str((first + last) // 2)) as terminal:
                begun.append((terminal.wait_for(BADGE)[0], terminal.cpu_s))
        row(f"first picture, {cold} file", least(begun), min(begun)[0], "1 s")
    for cold in ("cold", "warm"):
        with Terminal("replay", str(path), "--at", str(last)) as terminal:
            terminal.wait_for(BADGE)
            time.sleep(SETTLE_S)
            jumps(terminal, f"seek, {cold}", first, last, path if cold == "cold" else None)


def forget(path: Path) -> None:
    """Make the operating system read the file from the disk again."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def top(endpoint: str) -> Terminal:
    terminal = Terminal("top", endpoint)
    terminal.wait_for(BADGE)
    time.sleep(SETTLE_S)
    return terminal


def least(begun: Iterable[tuple[float, float]]) -> str:
    """The least wall seconds and processor time; other processes may have used the machine."""
    wall_s, cpu_s = (min(times) for times in zip(*begun, strict=True))
    return f"{wall_s:.2f} s, CPU {cpu_s:.2f} s"


def middle(times_ms: Iterable[float]) -> float:
    times = sorted(times_ms)
    return times[len(times) // 2]


def middle_and_most(times_ms: Iterable[float]) -> str:
    times = sorted(times_ms)
    return f"{middle(times):.0f}, p95 {times[len(times) * 95 // 100]:.0f} ms"


if __name__ == "__main__":
    main()
