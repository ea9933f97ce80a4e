"""`Stopwatch`: times work on a device.

On a GPU it uses CUDA events, after a warm-up. If possible the work runs as a CUDA graph, to avoid
launch gaps. On a CPU it uses the clock.
"""

import time
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], object]

# A round takes about this long at most, so slow runs do not all fit. Fewer are enough: slow runs
# evict one another's data from the cache anyway.
MOST_ROUND_MS = 100.0
# Stop after this much time with this many samples.
ENOUGH_MS, ENOUGH_SAMPLES = 1000.0, 5


class Stopwatch:
    def __init__(self, device: torch.device, num_samples: int) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.num_samples = num_samples

    def milliseconds(self, runs: Sequence[Run], *, can_capture: bool) -> list[float]:
        """Return the time of one run in milliseconds, one sample per round.

        A round executes all of `runs` in turn, and its sample is the mean. To measure with a cold
        L2 cache, pass several runs that use different memory.

        Args:
            can_capture: whether the runs may be recorded as a CUDA graph.
        """
        with torch.inference_mode():
            for run in runs:
                run()
            first_ms = self._round(runs[:1])
            runs = runs[: max(1, int(MOST_ROUND_MS / max(first_ms, 1e-3)))]
            once = self._captured(runs) if can_capture and self.is_gpu else runs
            self._round(once)
            samples: list[float] = []
            while len(samples) < self.num_samples:
                samples.append(self._round(once) / len(runs))
                if len(samples) >= ENOUGH_SAMPLES and sum(samples) * len(runs) > ENOUGH_MS:
                    break
            return samples

    def _captured(self, runs: Sequence[Run]) -> Sequence[Run]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return [graph.replay]

    def _round(self, runs: Sequence[Run]) -> float:
        if not self.is_gpu:
            start = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - start) * 1e3
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for run in runs:
            run()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]))
