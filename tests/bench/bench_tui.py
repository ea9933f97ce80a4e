"""What the dashboard costs: CPU and bytes written, in a real pseudo-terminal.

    python tests/bench/bench_tui.py [--seconds 20] [--size 200x60] [--fps 10] [--rate 50] [--keys 5]

A child process draws a live session of 64 running requests at so many steps a second; this process
reads what it writes, as a terminal would, and takes its CPU time from the operating system. The
child's figure includes receiving and reducing the messages, as in `stepscope top`.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import ptyprocess

WARM_UP_S = 4.0
NUM_REQUESTS = 64


class PacedSource:
    """Feeds a simulated session into its history in real time; implements `Source`."""

    is_live = True
    num_bad = 0
    name = "bench"
    status = "live"
    error: str | None = None

    def __init__(self, rate: float) -> None:
        from stepscope.engine import wire
        from stepscope.engine.config import Knobs
        from stepscope.engine.simulated import CostModel, SimulatedWorkload, simulate
        from stepscope.recordings.history import History
        from stepscope.recordings.source import FrameTap

        self.history = History()
        self.tap = FrameTap()
        self._period_s = 1 / rate
        messages = simulate(
            seed=1,
            num_steps=4_000,
            knobs=Knobs(max_num_batched_tokens=2048, max_num_seqs=NUM_REQUESTS),
            num_blocks=4096,
            workload=SimulatedWorkload(rate=14.0, output_tokens=240),
            cost=CostModel(floor_ms=14.0, token_us=10.0, context_ns=1.0),
        )
        self._frames = [
            (number, wire.encode(message), isinstance(message, wire.StepRecord))
            for number, message in messages
        ]
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        return

    def _feed(self) -> None:
        due_s = time.monotonic()
        num_steps = 0
        for number, payload, is_step in self._frames:
            self.history.append(number, payload)
            num_steps += is_step
            if num_steps > 1_000 and is_step:  # the first ones fill the memory at once
                due_s = max(due_s, time.monotonic() - 1) + self._period_s
                time.sleep(max(0.0, due_s - time.monotonic()))


def draw(fps: float, rate: float) -> None:
    """The child: a dashboard until it is killed."""
    from stepscope.tui.app import run_dashboard

    source = PacedSource(rate)
    source.start()
    run_dashboard(source, source.history, fps=fps)


def spin_ms() -> float:
    """CPU time of a fixed piece of work: how fast this machine is just now."""
    start_s = time.thread_time()
    total = 0
    for number in range(20_000):
        total += number * number
    return (time.thread_time() - start_s) * 1000


def measure(
    seconds: float, size: tuple[int, int], fps: float, rate: float, keys: str = ""
) -> dict[str, float]:
    """Run a child for `seconds` after a warm-up.

    Args:
        keys: typed before it is measured, to go to another screen than the main one.

    Returns:
        cpu_percent of one core; kilobytes_per_s written; spin_ms, to compare machines (and one
        machine with itself while others use it).
    """
    width, height = size
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    command += ["--fps", str(fps), "--rate", str(rate)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    child = ptyprocess.PtyProcess.spawn(command, dimensions=(height, width), env=environment)
    num_bytes = 0
    reading = True

    def read() -> None:
        nonlocal num_bytes
        while reading:
            try:
                num_bytes += len(child.read(65536))
            except EOFError:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not num_bytes:  # the session is simulated before anything is drawn
            time.sleep(0.1)
        time.sleep(WARM_UP_S / 2)
        child.write(keys.encode())
        time.sleep(WARM_UP_S / 2)
        process = psutil.Process(child.pid)
        before, bytes_before, start_s = process.cpu_times(), num_bytes, time.monotonic()
        spins_ms = []
        while time.monotonic() - start_s < seconds:
            time.sleep(0.2)
            spins_ms.append(spin_ms())
        after, elapsed_s = process.cpu_times(), time.monotonic() - start_s
        cpu_s = (after.user + after.system) - (before.user + before.system)
        return {
            "cpu_percent": 100 * cpu_s / elapsed_s,
            "kilobytes_per_s": (num_bytes - bytes_before) / 1000 / elapsed_s,
            "spin_ms": statistics.median(spins_ms),
        }
    finally:
        reading = False
        child.terminate(force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", default="200x60")
    parser.add_argument("--fps", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second")
    parser.add_argument("--keys", default="", help="typed first: 5 is the latency screen")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        draw(options.fps, options.rate)
        return
    width, height = (int(part) for part in options.size.split("x"))
    where = f", after the keys {options.keys}" if options.keys else ""
    print(f"{options.size}, {options.fps:g} frames/s, {options.rate:g} steps/s{where}")
    measured = measure(options.seconds, (width, height), options.fps, options.rate, options.keys)
    for name, value in measured.items():
        print(f"  {name:<18} {value:8.1f}")


if __name__ == "__main__":
    main()
