"""What watching several engines costs: CPU and memory of `stepscope top`, in a pseudo-terminal.

    python tests/bench/bench_fleet.py [--engines 1,4,16] [--seconds 15] [--rate 50]

A process of its own plays a session of 64 running requests on every endpoint. Of the dashboard the
operating system tells CPU time and resident memory: once on the fleet screen, once with an engine
opened. 100 % is one core; `spin` is the CPU time of a fixed piece of work meanwhile, which tells
how fast the machine was.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import ptyprocess

WARM_UP_S = 5.0


class Cost(NamedTuple):
    cpu_percent: float
    megabytes: float
    kilobytes_per_s: float  # written to the terminal
    spin_ms: float


def spin_ms() -> float:
    """CPU time of a fixed piece of work: a measure of the machine's current speed."""
    start_s = time.thread_time()
    total = 0
    for number in range(20_000):
        total += number * number
    return (time.thread_time() - start_s) * 1000


class Child:
    """`stepscope top` in a pseudo-terminal of 200 by 60."""

    def __init__(self, addresses: list[str]) -> None:
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "STEPSCOPE_CONFIG": "none",
        }
        environment.pop("NO_COLOR", None)
        command = [
            sys.executable,
            "-m",
            "stepscope.tui.cli",
            "top",
            *addresses,
            "--fps",
            "10",
        ]
        self.process = ptyprocess.PtyProcess.spawn(command, dimensions=(60, 200), env=environment)
        self.num_bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self.num_bytes += len(self.process.read(65536))
            except (EOFError, OSError, ValueError):
                return

    def measure(self, keys: str, seconds: float) -> Cost:
        """Measure after typing `keys`."""
        self.process.write(keys.encode())
        time.sleep(WARM_UP_S)
        process = psutil.Process(self.process.pid)
        before, bytes_before, start_s = process.cpu_times(), self.num_bytes, time.monotonic()
        spins_ms = []
        while time.monotonic() - start_s < seconds:
            time.sleep(0.2)
            spins_ms.append(spin_ms())
        after, elapsed_s = process.cpu_times(), time.monotonic() - start_s
        return Cost(
            100 * (after.user + after.system - before.user - before.system) / elapsed_s,
            process.memory_info().rss / 1e6,
            (self.num_bytes - bytes_before) / 1000 / elapsed_s,
            statistics.median(spins_ms),
        )


def measure(number: int, rate: float, seconds: float) -> dict[str, Cost]:
    """Cost by what is on the screen."""
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        addresses = [f"{folder}/played-{each}" for each in range(number)]
        player = Path(__file__).with_name("fleet_player.py")
        playing = subprocess.Popen(
            [sys.executable, str(player), str(rate), *addresses], stdout=subprocess.PIPE, text=True
        )
        try:
            assert playing.stdout is not None
            assert playing.stdout.readline() == "ready\n"
            child = Child(addresses)
            try:
                fleet = child.measure("8", seconds)
                return {"fleet": fleet, "one opened": child.measure("\r", seconds)}
            finally:
                child.process.terminate(force=True)
        finally:
            playing.kill()
            playing.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second of each")
    options = parser.parse_args()
    print(f"200x60, 10 frames/s, {options.rate:g} steps/s of 64 requests on each engine")
    print("engines  screen       CPU    memory   written    spin")
    for number in (int(each) for each in options.engines.split(",")):
        for screen, cost in measure(number, options.rate, options.seconds).items():
            print(
                f"{number:>7}  {screen:<10} {cost.cpu_percent:4.0f} %  {cost.megabytes:5.0f} MB"
                f"  {cost.kilobytes_per_s:4.0f} kB/s  {cost.spin_ms:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
