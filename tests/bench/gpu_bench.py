"""`Bench`: what every part of `bench_gpu.py` is given: the device, sizes, time, ways to report."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_report
import torch
from torch.utils.benchmark import Timer

from stepscope.engine.execution.devices import give_back_memory
from stepscope.engine.scheduling.step import DeviceMemoryError

# A round of slow runs takes at most about this long. Fewer copies are enough for them, because slow
# runs evict one another's data from the L2 cache anyway.
MOST_ROUND_MS = 100.0
Run = Callable[[], object]

_CURVE = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
# How much each part measures: on a data-centre GPU, and quickly.
_SIZES: dict[str, tuple[Any, Any]] = {
    "copy_bytes": (4 << 30, 1 << 20),
    "product_side": (8192, 256),
    "batches": ((1, 8, 32, 64, 128, 256), (1, 4)),
    "contexts": ((512, 4096), (16, 48)),
    "prefills": ((512, 1024, 2048, 4096, 8192, 16384), (16, 64)),
    "curve": (_CURVE, (1, 2, 4, 8, 16, 64, 128, 192, 256)),
    "num_samples": (20, 5),
    "kernel_shrink": (1, 64),  # batches, contexts and chunks of (e) are divided by it
    "kernel_heads": (((32, 8, 128), (16, 8, 128)), ((4, 2, 32),)),
    "rotation_bytes": (512 << 20, 1 << 14),  # several times the L2 of an H200
    "yardstick_requests": (256, 6),
    "yardstick_lengths": ((100, 1024), (4, 24)),
    "peer_requests": ((32, 256), (4,)),
    "peer_first_output": (16, 4),
    "num_streams": (64, 4),
    "stream_prompt": (256, 8),
    "stream_output": (256, 24),
    "num_arrivals": (4, 2),
    "arrival_prompt": (16384, 192),
    "arrival_spacing": (48, 6),  # tokens of each stream between two arrivals
    "budget": (2048, 64),  # token budget of the modes that split prompts into chunks
    "telemetry_pairs": (5, 2),
    "telemetry_requests": (64, 4),
    "telemetry_output": (128, 8),
    "exact_prompts": ((7, 64, 333, 1000), (5, 33)),
    "exact_tokens": (32, 8),
    "max_model_len": (20480, 320),
    "seq_capacity": (256, 8),
    "kv_memory": ("auto", "16MB"),
}


def sizes(*, is_quick: bool) -> SimpleNamespace:
    return SimpleNamespace(**{name: pair[is_quick] for name, pair in _SIZES.items()})


class NotMeasuredError(Exception):
    """A part, or what is left of it, cannot be measured. The message says why."""


class Bench:
    """Measures in one worker process, and writes what it finds into the report at once.

    Attributes:
        recordings: of (h): the file for each mode to record.
        common_settings: of all parts that follow.
    """

    def __init__(
        self, device: torch.device, report: gpu_report.Report, file: Path, *, is_quick: bool
    ) -> None:
        self.device, self.report = device, report
        self.is_gpu = device.type == "cuda"
        self.sizes = sizes(is_quick=is_quick)
        self.recordings: dict[str, str] = {}
        self.common_settings: dict[str, Any] = {}
        self._file = file
        self._outcome = gpu_report.Outcome(part="")
        self._deadline_s = float("inf")

    @contextlib.contextmanager
    def part(self, letter: str, model: str | None, seconds: float) -> Iterator[None]:
        """Make the `with` block one part of the report. An error ends the part, not the process."""
        start_s = time.monotonic()
        self._outcome = outcome = self.report.outcome(letter, model)
        self._deadline_s = start_s + seconds
        self.setting(**self.common_settings)
        why = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers and libraries may raise anything
            why = reason(error)
        give_back_memory(self.device)
        outcome.seconds += time.monotonic() - start_s
        if outcome.why in (None, gpu_report.UNFINISHED):
            outcome.why = why
        self.report.write(self._file)

    @property
    def points(self) -> list[gpu_report.Point]:
        """What this part has found so far."""
        return self._outcome.points

    def setting(self, **settings: Any) -> None:
        self._outcome.settings.update(settings)

    def doing(self, detail: str) -> None:
        """Tell the user what is measured now."""
        outcome = self._outcome
        on = f", {outcome.model}" if outcome.model else ""
        print(f"({outcome.part}) {gpu_report.PARTS[outcome.part][0]}{on}: {detail}", flush=True)

    @property
    def left_s(self) -> float:
        """Seconds until the part's time is up."""
        return self._deadline_s - time.monotonic()

    def check_time(self) -> None:
        if self.left_s <= 0:
            raise NotMeasuredError("time ran out before the remaining points (see --time-limit)")

    def found(self, what: str, samples: Sequence[float], **facts: Any) -> None:
        self.points.append(gpu_report.Point(what=what, samples=list(samples), facts=facts))
        self.report.write(self._file)

    def missing(self, what: str, why: str, **facts: Any) -> None:
        self.points.append(gpu_report.Point(what=what, facts=facts, why=why))

    @contextlib.contextmanager
    def attempt(self, what: str, **facts: Any) -> Iterator[None]:
        """Make the `with` block one point. An error is reported, and the part goes on.

        Raises:
            NotMeasuredError: the part's time is up; the block did not run.
        """
        self.check_time()
        self.doing(what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers and libraries may raise anything
            self.missing(what, reason(error), **facts)
        give_back_memory(self.device)

    def milliseconds(self, runs: Sequence[Run], *, can_capture: bool) -> list[float]:
        """Return samples of the time of one run.

        A sample is the mean of a round of all runs. For a cold L2 cache, pass runs that use
        different memory.

        Args:
            can_capture: whether they may be recorded as a CUDA graph, to avoid launch gaps.
        """

        def once() -> None:
            for run in runs:
                run()

        with torch.inference_mode():
            if not self.is_gpu:
                timer = Timer("f()", globals={"f": once}, num_threads=torch.get_num_threads())
                samples = [timer.timeit(1).mean * 1e3 for _ in range(self.sizes.num_samples + 1)]
                return [each / len(runs) for each in samples[1:]]
            import triton.testing  # not on every machine without a GPU

            first_ms = triton.testing.do_bench(runs[0], warmup=1, rep=1)
            runs = runs[: max(1, int(MOST_ROUND_MS / max(first_ms, 1e-3)))]
            measure = triton.testing.do_bench_cudagraph if can_capture else triton.testing.do_bench
            samples = measure(once, rep=MOST_ROUND_MS, return_mode="all")
            return [each / len(runs) for each in samples]


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    first = str(error).strip().partition("\n")[0].strip()[:300] or type(error).__name__
    is_full = isinstance(error, torch.OutOfMemoryError | DeviceMemoryError)
    return f"out of memory: {first}" if is_full else first
