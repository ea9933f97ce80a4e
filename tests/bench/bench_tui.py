"""What the dashboard costs, in a real pseudo-terminal, against an engine at any rate of steps.

    python tests/bench/bench_tui.py [--quick] [--sizes 120x40 200x60] [--rates 50 1000 5000]
                                    [--requests 64 256] [--seconds 4] [--recording FILE]

The engine is another process with real sockets; the dashboard is `stepscope top`, receiving and
reducing included. First what has an aim of its own, then every screen at every rate. Processor time
comes from the operating system; that of a frame is the drawing thread's, from its first line to the
last byte. A screen redraws its header ten times a second and all of it somewhat less than twice, so
its 95th percentile is a whole picture. At the rate of a real engine the aim grows with the number
of requests; at a higher one receiving takes what it takes, and the aim is that nothing is lost and
that a picture is done in time. A recording (`bench_recording.py --steps 1000000 --file FILE` makes
one) is opened and sought through as well.
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dashboard_terminal import Engine, Report, Terminal
from held_table import HeldTable, word

from stepscope.tui.settings.action_table import PAGES
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.views.view import ZOOMS

SETTLE_S = 1.5
NUM_MEMORY_STEPS = 100_000
BADGE = "LIVE|REPLAY"
START_END = "elsewhere"  # the last section of the start screen
PICTURE_BYTES = 2_000  # a screen that has changed is more
CORE_PERCENT, KILOBYTES_PER_S, FRAME_MS = 8.0, 350.0, 50.0  # at most, of 64 requests at ENGINE_RATE
ENGINE_RATE = 50.0  # steps a second
BURST_STEPS = 1_000  # arrive at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="what has an aim, and one size")
    parser.add_argument("--sizes", nargs="+", default=["120x40", "200x60"])
    parser.add_argument("--rates", nargs="+", type=float, default=[50.0, 1_000.0, 5_000.0])
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--screens", nargs="+", default=list(PAGES))
    parser.add_argument("--seconds", type=float, default=4.0, help="that a screen is measured")
    parser.add_argument("--only", choices=("aims", "screens", "recording"))
    parser.add_argument("--recording", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rates, options.requests = ["200x60"], [50.0], [64]
    with tempfile.TemporaryDirectory(prefix="sst") as name:
        folder = Path(name)
        table = HeldTable()
        if options.only in (None, "aims"):
            aims(table, folder, max(8.0, options.seconds))
        if options.recording is not None and options.only in (None, "recording"):
            recording(table, folder, options.recording)
        if options.only in (None, "screens"):
            screens(table, folder, options)
        table.end()


# What has an aim


def aims(table: HeldTable, folder: Path, seconds: float) -> None:
    row = table.row
    print(f"{'200x60':<44} {'measured':>28}  {'at most':>9}")
    with Engine(folder, 64, 50.0) as engine, top(engine, folder) as terminal:
        time.sleep(SETTLE_S)
        cpu, kilobytes = terminal.measure(seconds)
        row("main screen, 64 requests, 50 steps/s: core", f"{cpu:.1f} %", cpu, "8 %")
        row("  written", f"{kilobytes:.0f} KB/s", kilobytes, "350 KB/s")
        row("  frame, 50th and 95th percentile", frame_times(terminal.leave(), "live"))
    with Engine(folder, 64, 50.0) as engine, top(engine, folder) as terminal:
        time.sleep(SETTLE_S)
        keys = [BY_ID[f"screen_{page}"].keys[0] for page in ("step", "live", "latency", "live")]
        times = [terminal.answer_ms(key, PICTURE_BYTES) for key in keys * 5]
        row("key press to another screen", middle_and_most(times), middle(times), "50 ms")
        terminal.type(" ")
        times = []
        for _ in range(20):
            time.sleep(0.3)
            times.append(terminal.answer_ms("\x1b[5~", PICTURE_BYTES))  # page up
        row("key press to a screen of steps before", middle_and_most(times), middle(times), "50 ms")
    with Engine(folder, 64, 5_000.0) as engine, top(engine, folder) as terminal:
        time.sleep(SETTLE_S)
        cpu, _ = terminal.measure(seconds)
        told = terminal.leave()
        missing = f"{told.num_lost} lost, {told.num_recovered} healed"
        row("receiving 5,000 steps/s while drawing", missing, told.num_lost, "0 lost")
        row("  core", f"{cpu:.0f} %")
        row("  frames dropped", str(told.num_dropped))
    in_memory(table, folder)
    fleet(table, folder, seconds)
    first_picture(table, folder, "stepscope", [], START_END)
    first_picture(table, folder, "stepscope replay", ["replay", "freeze"])
    first_picture(table, folder, "stepscope top", ["top"])


def in_memory(table: HeldTable, folder: Path) -> None:
    """A session of 100,000 steps, and jumps through it."""
    row = table.row
    rng = random.Random(3)
    with (
        Engine(folder, 64, 50.0, burst=NUM_MEMORY_STEPS) as engine,
        top(engine, folder) as terminal,
    ):
        terminal.wait_for(r"10\d,\d\d\d", timeout_s=300)  # the burst has been received
        time.sleep(SETTLE_S)
        resident = terminal.process.memory_info().rss
        row(
            "memory, 100,000 steps of 64 requests",
            f"{resident / 1e6:.0f} MB",
            resident / 1e6,
            "300 MB",
        )
        terminal.type(" ")
        time.sleep(0.5)
        for zoom in (1, 5, 50):
            times, cpu_ms = jumps(terminal, rng, 1_000, NUM_MEMORY_STEPS)
            text = f"{middle_and_most(times)}; CPU {cpu_ms:.0f}"
            row(f"jump to any step in memory, zoom {zoom}", text, middle(times), "50 ms")
            terminal.type("x" * (ZOOMS.index(5) - ZOOMS.index(1) if zoom == 1 else 3))
            time.sleep(1.0)


def jumps(
    terminal: Terminal, rng: random.Random, first: int, last: int
) -> tuple[list[float], float]:
    """Go to 25 steps by typing their numbers: milliseconds of each, and processor time of one."""
    times, spent_s = [], 0.0
    for _ in range(25):
        step = rng.randrange(first, last)
        terminal.type(f"g{step}")
        time.sleep(0.35)
        before_s = terminal.cpu_s
        times.append(terminal.answer_ms("\r", shows=f"{step:,}"))
        spent_s += terminal.answered_cpu_s - before_s
    return times, spent_s / 25 * 1e3


def fleet(table: HeldTable, folder: Path, seconds: float) -> None:
    """Four engines on one screen."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(folder, 64, ENGINE_RATE)) for _ in range(4)]
        terminal = stack.enter_context(Terminal(["top", *(each.endpoint for each in engines)]))
        terminal.wait_for(BADGE)
        time.sleep(SETTLE_S)
        cpu, kilobytes = terminal.measure(seconds)
        resident = terminal.process.memory_info().rss
    table.row("four engines, 50 steps/s each: core", f"{cpu:.1f} %")
    table.row("  written; memory", f"{kilobytes:.0f} KB/s; {resident / 1e6:.0f} MB")


def first_picture(
    table: HeldTable, folder: Path, what: str, arguments: list[str], shows: str = BADGE
) -> None:
    """From the command to a picture; the least of five, since the machine may be shared."""
    begun = []
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            more = []
            if arguments == ["top"]:
                more = [stack.enter_context(Engine(folder, 64, 50.0)).endpoint]
            terminal = stack.enter_context(Terminal([*arguments, *more]))
            begun.append((terminal.wait_for(shows), terminal.cpu_s))
    table.row(f"{what}: first picture", least(begun), min(begun)[0], "1 s")


# A long recording


def recording(table: HeldTable, folder: Path, path: Path) -> None:
    from stepscope.recordings.file.reader import Recording

    with Recording(path) as opened:
        first, last = opened.first_step or 0, opened.last_step or 0
    row = table.row
    print(f"\n{path.name}, {last - first + 1:,} steps")
    for is_cold in (True, False):
        begun = []
        for _ in range(3):
            if is_cold:
                forget(path)
            with Terminal(["replay", str(path), "--at", str((first + last) // 2)]) as terminal:
                begun.append((terminal.wait_for(BADGE), terminal.cpu_s))
        cold = "cold" if is_cold else "warm"
        row(f"first picture, {cold} file", least(begun), min(begun)[0], "1 s")
    rng = random.Random(4)
    report = folder / "replay.json"
    with Terminal(["replay", str(path), "--at", str(last)], report=report) as terminal:
        terminal.wait_for(BADGE)
        time.sleep(SETTLE_S)
        for zoom in (1, 5, 50):
            for is_cold in (True, False):
                if is_cold:
                    forget(path)
                times, cpu_ms = jumps(terminal, rng, first, last)
                cold = "cold" if is_cold else "warm"
                what = f"seek to any step, zoom {zoom}, {cold}"
                text = f"{middle_and_most(times)}; CPU {cpu_ms:.0f}"
                row(what, text, middle(times), "50 ms")
            terminal.type("x" * (ZOOMS.index(5) - ZOOMS.index(1) if zoom == 1 else 3))
            time.sleep(1.0)
        peak = terminal.leave().peak_bytes
        row("memory of it at most", f"{peak / 1e6:.0f} MB")


def forget(path: Path) -> None:
    """Make the operating system read the file from the disk again."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Every screen


def screens(table: HeldTable, folder: Path, options: argparse.Namespace) -> None:
    print(
        f"\n{'requests':>8} {'steps/s':>8} {'size':>7}  {'screen':<8}"
        f"{'core %':>8} {'at most':>8}{'KB/s':>7} {'at most':>8}"
        f"{'frame ms p50':>14} {'p95':>6} {'at most':>8}"
    )
    for num_requests in options.requests:
        for rate in options.rates:
            for size in options.sizes:
                each_screen(table, folder, num_requests, rate, size, options)


def each_screen(
    table: HeldTable,
    folder: Path,
    num_requests: int,
    rate: float,
    size: str,
    options: argparse.Namespace,
) -> None:
    width, height = (int(part) for part in size.split("x"))
    with (
        Engine(folder, num_requests, rate, BURST_STEPS) as engine,
        top(engine, folder, (width, height)) as terminal,
    ):
        start_s = time.monotonic()
        time.sleep(SETTLE_S)
        measured = []
        for page in options.screens:
            terminal.type(BY_ID[f"screen_{page}"].keys[0])
            time.sleep(SETTLE_S)
            measured.append(terminal.measure(options.seconds))
            terminal.type("1")
            time.sleep(0.3)
        elapsed_s = time.monotonic() - start_s
        told = terminal.leave()
    most_core = CORE_PERCENT * num_requests / 64 if rate <= ENGINE_RATE else None
    for page, (cpu, kilobytes) in zip(options.screens, measured, strict=True):
        half_ms, most_ms = percentiles_ms(told, page)
        where = f"{num_requests:>8} {rate:>8g} {size:>7}  {page:<8}"
        pairs = [(cpu, most_core), (kilobytes, KILOBYTES_PER_S), (most_ms, FRAME_MS)]
        is_held = table.judge(where, pairs)
        core = "" if most_core is None else f"{most_core:g}"
        print(
            f"{where}{cpu:>8.1f} {core:>8}{kilobytes:>7.0f} {KILOBYTES_PER_S:>8g}"
            f"{half_ms:>14.1f} {most_ms:>6.1f} {FRAME_MS:>8g}  {word(is_held)}",
            flush=True,
        )
    where = f"{num_requests:>8} {rate:>8g} {size:>7}  messages"
    is_held = table.judge(where, [(told.num_lost, 0)])
    # The bench's engine may not reach the rate that was asked for.
    came = f"{(told.last_step - BURST_STEPS) / elapsed_s:,.0f} steps/s came"
    lost = f"{told.num_lost} lost, {told.num_recovered} asked for again"
    print(f"{where} {came}, {lost}  {word(is_held)}", flush=True)


# Words


def top(engine: Engine, folder: Path, size: tuple[int, int] = (200, 60)) -> Terminal:
    terminal = Terminal(["top", engine.endpoint], size, folder / "report.json")
    terminal.wait_for(BADGE)
    return terminal


def least(begun: Iterable[tuple[float, float]]) -> str:
    """The least wall seconds and processor time; other processes may have used the machine."""
    wall_s, cpu_s = (min(times) for times in zip(*begun, strict=True))
    return f"{wall_s:.2f} s, CPU {cpu_s:.2f} s"


def frame_times(told: Report, page: str) -> str:
    half_ms, most_ms = percentiles_ms(told, page)
    return f"{half_ms:.1f}, {most_ms:.1f} ms"


def percentiles_ms(told: Report, page: str) -> tuple[float, float]:
    """The 50th and 95th percentile of a screen's frames; zero if it was never redrawn."""
    times = sorted(took_s * 1e3 for shown, took_s in told.frames if shown == page) or [0.0]
    return times[len(times) // 2], times[len(times) * 95 // 100]


def middle(times_ms: Iterable[float]) -> float:
    times = sorted(times_ms)
    return times[len(times) // 2]


def middle_and_most(times_ms: Iterable[float]) -> str:
    times = sorted(times_ms)
    return f"{middle(times):.0f}, p95 {times[len(times) * 95 // 100]:.0f} ms"


if __name__ == "__main__":
    main()
