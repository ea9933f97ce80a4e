"""How much of the host's work between two steps overlap hides from the device.

    python tests/bench/bench_overlap.py [--quick]

The engine is the real one, with telemetry, and all requests decode. In place of a GPU there is a
clock: a step takes its time from when the device is free, whatever the host does meanwhile. Host
work is what a step takes beyond that without overlap; hidden is the share of it that is gone with
overlap, 100 % where the device never waits. A host that needs longer than the device hides no more
than the device's time. Engines take turns of a few steps, so that all see the same machine;
medians of the turns.
"""

import argparse
import gc
import statistics
import tempfile
import time

from stepscope.engine.loop import dispatch
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import InFlight, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import simulated_info
from stepscope.engine.telemetry.publisher import Publisher

NUM_TURNS = 30
TURN = 20  # steps
_SPIN_NS = 300_000  # a sleep may end that much late


class Clock:
    """`Runner` of a device whose steps of `step_ms` run one after another."""

    def __init__(self, step_ms: float) -> None:
        self._step_ns = round(step_ms * 1e6)
        self._free_ns = 0

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).collect()

    def launch(self, step: ScheduledStep) -> InFlight:
        launch_ns = time.monotonic_ns()
        self._free_ns = max(launch_ns, self._free_ns) + self._step_ns
        return Launched([7 if row.samples else None for row in step.rows], launch_ns, self._free_ns)


class Launched:
    is_whole = True

    def __init__(self, token_ids: list[int | None], launch_ns: int, end_ns: int) -> None:
        self._token_ids = token_ids
        self._launch_ns = launch_ns
        self._end_ns = end_ns

    def collect(self) -> StepResult:
        left_ns = self._end_ns - time.monotonic_ns()
        if left_ns > _SPIN_NS:
            time.sleep((left_ns - _SPIN_NS) / 1e9)
        while (now_ns := time.monotonic_ns()) < self._end_ns:
            pass
        return StepResult(self._token_ids, self._launch_ns, now_ns)


class Nobody:
    def reply(self, message: AnyReply) -> None:
        return


def decoding(num_requests: int, step_ms: float, publisher: Publisher, overlap: bool) -> EngineCore:
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_model_len=1280)
    num_blocks = num_requests * 80
    knobs = Knobs(max_num_batched_tokens=8192, max_num_seqs=num_requests)
    core = EngineCore(
        simulated_info(limits, num_blocks, 16, seed=0),
        Clock(step_ms),
        Scheduler(KVCacheManager(num_blocks, 16), knobs, limits),
        limits,
        publisher,
        dispatch,
        overlap=overlap,
    )
    sampling = SamplingParams(max_tokens=1200, ignore_eos=True)
    for number in range(num_requests):
        first = number << 7
        prompt = list(range(first, first + 16 + number % 16))
        core.inbox.put(Call(Submit(sampling=sampling), Nobody(), prompt))
    for _ in range(5):
        core.step()
    return core


def step_times_ms(engines: list[EngineCore], num_turns: int) -> list[float]:
    """The time of a step of each engine."""
    times: list[list[float]] = [[] for _ in engines]
    gc.collect()
    gc.freeze()
    for _ in range(num_turns):
        for core, own in zip(engines, times, strict=True):
            core.step()  # the steps launched in its last turn have long ended
            begin = time.perf_counter()
            for _ in range(TURN):
                core.step()
            own.append((time.perf_counter() - begin) * 1e3 / TURN)
    gc.unfreeze()
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host work that overlap hides.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the turns")
    num_turns = NUM_TURNS // 5 if parser.parse_args().quick else NUM_TURNS
    names = ("device ms", "serial ms", "overlap ms", "host ms", "hidden", "steps/s")
    print(f"{'requests':>9}" + "".join(f"{name:>12}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(f"ipc://{folder}/telemetry", ring_size=1000)
        for num_requests in (1, 16, 64, 256):
            for step_ms in (1.0, 5.0):
                pair = [decoding(num_requests, step_ms, publisher, way) for way in (False, True)]
                serial, overlap = step_times_ms(pair, num_turns)
                host = serial - step_ms
                hidden = (serial - overlap) / host
                print(
                    f"{num_requests:>9}{step_ms:>12.1f}{serial:>12.2f}{overlap:>12.2f}{host:>12.2f}"
                    f"{hidden:>12.0%}{serial / overlap:>11.2f}x",
                    flush=True,
                )
        publisher.close()


if __name__ == "__main__":
    main()
