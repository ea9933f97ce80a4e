"""Measures `History` on a long session of many requests (`synthetic_session.py`).

    python tests/bench/bench_history.py [--steps 100000] [--requests 64]

Prints time to take a step, memory, and time to go to any step and to read figures.
"""

import argparse
import gc
import random
import resource
import sys
import time

from synthetic_session import session

from stepscope.recordings.history.history import History
from tests.support.sessions.lanes_of import lanes_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    history = History()
    gc.collect()
    before_bytes = _resident_bytes()
    spent_s = 0.0
    num_bytes = 0
    for frame in session(arguments.steps, arguments.requests):
        started_s = time.thread_time()
        history.append(frame.sequence, frame.payload)
        spent_s += time.thread_time() - started_s
        num_bytes += len(frame.payload)
    memory = (_resident_bytes() - before_bytes) / 1e6
    print(f"record size on the wire      {num_bytes / arguments.steps:8.0f} bytes a step")
    print(f"taken                        {spent_s / arguments.steps * 1e6:8.1f} us a step")
    print(f"memory                       {memory:8.1f} MB for {history.num_steps:,} steps")
    _measure_history(history, arguments.steps)


def _measure_history(history: History, num_steps: int) -> None:
    rng = random.Random(1)
    steps = [rng.randrange(history.first_step or 0, num_steps) for _ in range(200)]
    _print("state at any step", [_timed(history.state_at, step) for step in steps])
    _print("record of any step", [_timed(history.record, step) for step in steps])
    _print("lanes of 200 steps", [_timed(history.lanes, s - 199, s) for s in steps[:50]])
    _print("200 summaries", [_timed(history.summaries, s - 199, s) for s in steps])
    last = num_steps - 1
    lanes_of(history, last - 199, last)
    _print("lanes, nothing new", [_timed(history.lanes, last - 199, last) for _ in range(20)])
    _print("latencies of 60 s", [_timed(history.latency) for _ in range(20)])
    _print("latencies of all", [_timed(history.latency, None, None) for _ in range(3)])
    _print("rates of 10 s", [_timed(history.rates) for _ in range(20)])


def _timed(function: object, *arguments: object) -> float:
    assert callable(function)
    started_s = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - started_s) * 1e3


def _print(what: str, spent_ms: list[float]) -> None:
    spent_ms.sort()
    print(
        f"{what:28} {spent_ms[len(spent_ms) // 2]:8.2f} ms, at most {spent_ms[-1]:.2f} ms "
        f"({len(spent_ms)} times)"
    )


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
