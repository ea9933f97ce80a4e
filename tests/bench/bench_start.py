"""How soon the start screen is there: `stepscope` alone, in a pseudo-terminal.

    python tests/bench/bench_start.py [--runs 10]

The clock starts before the process does and stops when the last section of the list has been
written; CPU time of the process at that moment comes from the operating system. Beside it, taken in
turns, how long an empty Python and an import of Textual take on this machine just now.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
import ptyprocess

LAST = "elsewhere"  # the section that is drawn last
LIMIT_S = 30.0


def first_picture(folder: str) -> tuple[float, float]:
    """Seconds until the first picture is drawn, and CPU seconds until then."""
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "STEPSCOPE_CONFIG": "none",
        "XDG_STATE_HOME": folder,
        "XDG_RUNTIME_DIR": folder,
    }
    start_s = time.perf_counter()
    child = ptyprocess.PtyProcess.spawn(
        [sys.executable, "-m", "stepscope.tui.cli"], env=environment, dimensions=(40, 120)
    )
    received = b""
    while LAST.encode() not in received:
        assert time.perf_counter() - start_s < LIMIT_S, received[-500:]
        received += child.read(65536)
    elapsed_s = time.perf_counter() - start_s
    times = psutil.Process(child.pid).cpu_times()
    child.terminate(force=True)
    return elapsed_s, times.user + times.system


def run_python(program: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        for _ in range(options.runs):
            wall_s, cpu_s = first_picture(folder)
            measured.setdefault("first picture", []).append(wall_s)
            measured.setdefault("... CPU until then", []).append(cpu_s)
            measured.setdefault("empty Python", []).append(run_python("pass"))
            textual_s = run_python("from textual.app import App")
            measured.setdefault("import of Textual", []).append(textual_s)
    print(f"load {os.getloadavg()[0]:.1f}, {options.runs} runs, seconds   least  median   most")
    for name, values in measured.items():
        row = (min(values), statistics.median(values), max(values))
        print(f"{name:<36}" + "".join(f"{value:>8.2f}" for value in row))


if __name__ == "__main__":
    main()
