"""How fast a simulation is, and how much memory a long one takes.

    python tests/bench/bench_simulate.py [--quick] [--trace FILE] [--requests N]

By the time of the processor: one core, an H100 with an 8B model by roofline, no recording. The
Azure conversation trace where it is given, else a mix of about its lengths (1,155 tokens in, 211
out). Requests a second and virtual seconds a second at the trace's own load and at four times it;
20 runs of a session of 60 s; and the peak memory of a long run in a process of its own, beside that
of a run of a tenth of it. Aims: 200 times real time, 2,500 requests/s, 20 runs in 5 s, no growth.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from simulated_gpu import setup

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import (
    DrawnStepTimes,
    SimulatedRequest,
    of_mix,
    of_trace,
)
from stepscope.engine.simulation.virtual.session import run_requests
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.simulation.figures import RunSums
from stepscope.recordings.state.series.latency import SLO

LIKE_AZURE = WorkloadSpec(rate=5.4, document_share=0.0, chat_tokens=1155, output_tokens=211)
SESSION_S = 60


def run(requests: Iterable[SimulatedRequest], *, short: bool = True) -> tuple[float, RunSums]:
    """Processor seconds, and the result."""
    made, figures = setup(Knobs()), RunSums(SLO())
    model = DrawnStepTimes(made.model, 0)
    begin_s = time.process_time()
    run_requests(Replica(made.scheduler(), model, figures, takes_short_way=short), requests)
    return time.process_time() - begin_s, figures


def work(trace: Path | None, count: int, scale: float) -> list[SimulatedRequest]:
    if trace is not None:
        return list(of_trace(read_trace(trace, count), 8192, scale))
    mix = of_mix(like_azure(count), 8192)
    return [each._replace(arrival_ns=round(each.arrival_ns * scale)) for each in mix]


def like_azure(count: int) -> WorkloadSpec:
    return msgspec.structs.replace(LIKE_AZURE, num_requests=count)


def speed(trace: Path | None, count: int) -> None:
    print(f"{'load':<12}{'way':<10}{'requests/s':>12}{'x real time':>13}{'steps/s':>12}")
    for scale, load in ((1.0, "as it is"), (0.25, "four times")):
        requests = work(trace, count, scale)
        for short in (True, False):
            cpu_s, figures = run(requests, short=short)
            found = figures.result()
            print(
                f"{load:<12}{'short' if short else 'each step':<10}"
                f"{found.num_requests / cpu_s:>12,.0f}{found.seconds / cpu_s:>12,.0f}x"
                f"{found.num_steps / cpu_s:>12,.0f}"
            )


def replicates(trace: Path | None, count: int) -> None:
    session = [
        each for each in work(trace, 2000, 1.0) if each.arrival_ns < SESSION_S * 1_000_000_000
    ]
    cpu_s = sum(run(session)[0] for _ in range(count))
    print(f"{count} runs of a session of {SESSION_S} s ({len(session)} requests): {cpu_s:.1f} s")


def memory(count: int) -> None:
    """Peak memory of runs in processes of their own."""
    for each in (count // 10, count):
        command = [sys.executable, __file__, "--peak", str(each)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{each:>9,} requests: {done.stdout.strip()}")


def peak(count: int) -> None:
    cpu_s, figures = run(of_mix(like_azure(count), 8192))
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {megabytes:,.0f} MB, {figures.num_finished / cpu_s:,.0f} requests/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the long run")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak is not None:
        peak(given.peak)
        return
    speed(given.trace, 100 if given.quick else 2000)
    replicates(given.trace, 1 if given.quick else 20)
    memory(200 if given.quick else given.requests)


if __name__ == "__main__":
    main()
