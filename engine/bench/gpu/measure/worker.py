"""A worker process of the benchmark: reads its job (one line of JSON), reports results as lines.

`conduct` starts the worker by `python -m`. The worker ends when the job is done. It also ends at
once when its standard input ends, because its parent process is gone then.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from stepscope.engine.bench.gpu.parts import (
    BenchJob,
    Failed,
    Hello,
    Message,
    share_of,
)
from stepscope.engine.execution.machine.environment import prepare_environment
from stepscope.engine.protocol.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from stepscope.engine.bench.gpu.measure.bench import Bench

PACKAGES = ("stepscope", "torch", "triton", "flash-attn", "transformers", "numpy")


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries must not mix with the messages
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=BenchJob)
    threading.Thread(target=_end_with_input, args=(sys.stdin.buffer,), daemon=True).start()
    lock = threading.Lock()

    def report(message: Message) -> None:
        with lock:
            answers.write(msgspec.json.encode(message) + b"\n")
            answers.flush()

    try:
        run(job, report)
    except Exception as error:  # noqa: BLE001 - report it; only this process ends
        lines = str(error).strip().splitlines() or [type(error).__name__]
        report(Failed(lines[0][:300]))
    sys.stdout.flush()
    # Do not wait for a library's threads, which may never end.
    os._exit(0)


def run(job: BenchJob, report: Callable[[Message], None]) -> None:
    """Measure the parts of a job, and report the results.

    Raises:
        Exception: the job as a whole cannot be measured.
    """
    start_s = time.monotonic()
    prepare_environment(EngineConfig())
    import torch

    from stepscope.engine.bench.gpu.measure import ceilings, exactness, kernels, peer
    from stepscope.engine.bench.gpu.measure.bench import Bench
    from stepscope.engine.execution.machine.devices import find_device

    device = find_device(job.device)
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "CPU"
    report(Hello(name, is_gpu, _versions(torch)))
    bench = Bench(device, job.sizes, report)
    left = list(job.parts)

    def seconds() -> float:
        """Return the time limit of the next part: its share of the remaining time."""
        weights = sum(job.part_weight(part) for part in left)
        weight = job.part_weight(left.pop(0))
        return share_of(job.seconds - (time.monotonic() - start_s), weight, weights)

    if job.model is None or job.is_peer or job.parts == "j":
        torch.manual_seed(0)
        for part in job.parts:
            with bench.part(part, job.model, seconds()):
                if part == "a":
                    ceilings.measure(bench)
                elif part == "e":
                    kernels.measure(bench)
                elif part == "g":
                    assert job.model is not None
                    peer.measure(bench, job.model)
                else:
                    assert job.model is not None
                    exactness.measure(bench, job.model)
        return
    _run_engine(job, bench, seconds)


def _run_engine(job: BenchJob, bench: "Bench", seconds: Callable[[], float]) -> None:
    from stepscope.engine.bench.gpu.measure import arrivals, step_times, telemetry_cost, yardstick
    from stepscope.engine.bench.gpu.measure.steps import engine_side

    assert job.model is not None
    with engine_side(bench, job.model) as engine:
        for part in job.parts:
            with bench.part(part, job.model, seconds()):
                if part == "b":
                    step_times.measure_decode(bench, engine)
                elif part == "c":
                    step_times.measure_prefill(bench, engine)
                elif part == "d":
                    step_times.measure_curve(bench, engine)
                elif part == "f":
                    yardstick.measure_yardstick(bench, engine)
                elif part == "g":
                    yardstick.measure_same_work(bench, engine, job.peer_works)
                elif part == "h":
                    arrivals.measure(bench, engine, job.recorder, job.recordings)
                else:
                    telemetry_cost.measure(bench, engine)


def _versions(torch: ModuleType) -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    # Torch itself names its build (2.13.0+cu130). The package's version may leave that out.
    return {**found, "torch": str(torch.__version__), "CUDA": torch.version.cuda or "none"}


def _end_with_input(stream: BinaryIO) -> None:
    while stream.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
