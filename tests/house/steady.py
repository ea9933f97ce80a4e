"""Runs `make test` again and again beside two busy loops, and counts the runs that pass.

A test whose outcome depends on how fast the machine is fails here. `make steady ARGS="--runs 3"`.
"""

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--loops", type=int, default=2, help="busy processes beside the tests")
    options = parser.parse_args()
    num_passed = 0
    with ExitStack() as stack:
        for _ in range(options.loops):
            stack.callback(subprocess.Popen(_BUSY).kill)
        for number in range(1, options.runs + 1):
            begun_s = time.monotonic()
            done = subprocess.run(
                ["make", "test", "ARGS="], capture_output=True, text=True, check=False
            )
            took_s = time.monotonic() - begun_s
            num_passed += done.returncode == 0
            failed = [
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            if done.returncode and not failed:
                failed = [done.stdout[-500:], done.stderr[-500:]]
            print(
                f"run {number}: {took_s:.0f} s, {len(failed)} failed",
                *failed,
                sep="\n  ",
                flush=True,
            )
    print(f"{num_passed} of {options.runs} runs passed")
    sys.exit(num_passed < options.runs)


if __name__ == "__main__":
    main()
