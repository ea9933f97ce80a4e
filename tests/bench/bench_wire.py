"""What telemetry costs the engine, and what a recorder takes.

- Engine: decode steps of an engine without a model, telemetry switched every few steps: processor
  time of the engine's thread, by what that thread does for `--pause-ms` between two steps.
- Recorder: `stepscope record` on one core against an engine that publishes at a given rate.

With `--inline` the engine's thread sends the messages itself, as where there is no C compiler.

    make bench-wire ARGS="--rate 5000 --seconds 10"
"""

import gc
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common import parser

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import Runner, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.telemetry import sender
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.recordings.check.verify import verify
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import simulated_info

HERE = Path(__file__).parent
STEPS_A_ROUND = 10
NUM_WARM = 2  # of them, not counted: the first publishes the changes made while telemetry was off
STARTING_S = 0.5  # processor time of a command that does nothing
RECORDED_REQUESTS = 64
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.SUB)
socket.connect(sys.argv[1]); socket.subscribe(b"")
while True: socket.recv_multipart()
"""


def busy(work: Callable[[], object]) -> Callable[[float], None]:
    def wait(seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            work()

    return wait


# What the engine's thread does between two steps. What their bookkeeping costs depends on it: its
# code and data are in the caches, or have to come from memory again.
_WEIGHTS = bytearray(12_000_000)
PAUSES: dict[str, Callable[[float], None]] = {
    "none": lambda seconds: None,  # steps follow one another
    "spin": busy(lambda: None),  # like a thread that waits for a GPU
    "sleep": time.sleep,  # the core may run other threads, or rest
    "memory": busy(lambda: bytes(_WEIGHTS)),  # like a model on this core
}


class PausingRunner(SimulatedRunner):
    """A runner without a model whose steps take so many seconds, in one of these ways."""

    def __init__(self, pause: str, pause_s: float) -> None:
        super().__init__(CostModel())
        self._pause, self._pause_s = PAUSES[pause], pause_s

    def execute(self, step: ScheduledStep) -> StepResult:
        self._pause(self._pause_s)
        return super().execute(step)


# Engine


def print_engine(num_requests: int, rounds: int, pause_s: float) -> None:
    print(
        f"decode steps of {num_requests} requests without a model: the engine's thread, us a step; "
        f"{rounds} pairs of {STEPS_A_ROUND} steps"
    )
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_model_len=8192)
    for pause, readers in itertools.product(PAUSES, (0, 1, 5, "5 on one core")):
        core = engine(PausingRunner(pause, pause_s), num_requests * 520, limits, rounds)
        on_s, off_s = switched(core, readers, rounds)
        print(
            f"  pause {pause:6}, subscribers: {readers:<13}  "
            f"off {statistics.median(off_s) * 1e6:5.0f}, telemetry adds {added(on_s, off_s)}"
        )


def added(on_s: list[float], off_s: list[float]) -> str:
    """How much more a round costs than its neighbour, in us, which removes the machine's drift."""
    more = [(a - b) * 1e6 for a, b in zip(on_s, off_s, strict=True)]
    error = 1.25 * statistics.stdev(more) / math.sqrt(len(more))  # a median's is that much larger
    return f"{statistics.median(more):+.0f} (+- {error:.0f})"


def engine(runner: Runner, num_blocks: int, limits: Limits, rounds: int) -> EngineCore:
    """With as many requests as it may run, that last until the end of the measurement.

    They are at different places of their blocks, as anywhere: each step takes some.
    """
    knobs = Knobs(max_num_batched_tokens=8192)
    scheduler = Scheduler(KVCacheManager(num_blocks, 16), knobs, limits)
    info = simulated_info(limits, num_blocks, 16, seed=0)
    core = EngineCore(info, runner, scheduler, None)
    sampling = SamplingParams(max_tokens=2 * rounds * STEPS_A_ROUND + 50, ignore_eos=True)
    for number in range(limits.max_num_seqs):
        token_ids = [(number * 37 + i) % 256 for i in range(64 + number % 16)]
        core.inbox.put(Call(Submit(sampling=sampling), SilentClient(), token_ids))
    return core


@contextmanager
def subscribers(address: str, readers: int | str) -> Iterator[None]:
    """So many processes that read all telemetry and do nothing else; `5 on one core`: they stay."""
    count = readers if isinstance(readers, int) else 5
    started = [subprocess.Popen([sys.executable, "-c", SUBSCRIBER, address]) for _ in range(count)]
    for process in started if isinstance(readers, str) else ():
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def switched(core: EngineCore, readers: int | str, rounds: int) -> tuple[list[float], list[float]]:
    """Processor seconds of a step with telemetry and without, by turns: medians of rounds."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/telemetry"
        publisher = Publisher(address, 20_000)
        with subscribers(address, readers):
            for _ in range(20):  # prefill, and subscribers that have connected
                core.step()
            time.sleep(0.5)
            gc.collect()
            gc.freeze()  # as `serve` does
            for turn in range(2 * rounds):
                published = turn % 4 in (0, 3)  # on, off, off, on: a drift falls on both alike
                core.outlet.sink = publisher if published else None
                steps = []
                for _ in range(STEPS_A_ROUND):
                    start_s = time.thread_time()
                    core.step()
                    steps.append(time.thread_time() - start_s)
                times[published].append(statistics.median(steps[NUM_WARM:]))
        publisher.close()
    gc.unfreeze()
    gc.collect()
    return times[True], times[False]


# Recorder


def on_core(core: int, *command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def print_recorder(rate: float, seconds: float) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        endpoint, path = f"{folder}/fast", Path(folder) / "session.mcap"
        sizes = {"rate": rate, "seconds": seconds, "requests": RECORDED_REQUESTS, "burst": 0}
        options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        engine = on_core(cores[0], str(HERE / "fed_engine.py"), endpoint, *options)
        try:
            engine.stdout.readline()
            command = ("-m", "stepscope.tui.cli", "record", endpoint, "-o", str(path))
            recorder = on_core(cores[-1], *command)
            words = engine.stdout.readline().split()
            num_messages, num_steps, num_dropped = map(int, words[:3])
            ended_s = time.perf_counter()
            said = recorder.stdout.read()
            behind_s = time.perf_counter() - ended_s
            used = os.wait4(recorder.pid, 0)[2]
            used_us = (used.ru_utime + used.ru_stime - STARTING_S) / num_steps * 1e6
        finally:
            engine.kill()
            engine.wait()
        report = verify(path, lambda share: None)
    print(
        f"recorder: {num_steps / float(words[3]):,.0f} steps a second of {RECORDED_REQUESTS} "
        f"requests: {report.num_steps:,} of {num_steps:,} steps in the file, "
        f"{report.num_lost_messages} of {num_messages:,} messages lost, {num_dropped} dropped on "
        f"the way and asked for again, done {behind_s:.1f} s after the engine; all is "
        f"{'well' if report.is_good else 'not well'}"
    )
    print(f"  {used_us:.0f} us of processor time a step; it says: {said.strip()}")


def main() -> None:
    sizes = {"requests": 256, "rounds": 60, "rate": 5000.0, "seconds": 10.0, "pause_ms": 2.0}
    options = parser(__doc__, **sizes, inline=False)
    options.add_argument("--only", choices=("engine", "recorder"))
    given = options.parse_args()
    if given.inline:
        sender.compiled = None
    if given.only in (None, "engine"):
        print_engine(given.requests, 3 * given.rounds, given.pause_ms / 1e3)
    if given.only in (None, "recorder"):
        print_recorder(given.rate, given.seconds)


if __name__ == "__main__":
    main()
