"""`Stopwatch`: how long a piece of work takes on a device, by its own events.

A GPU is timed by CUDA events around work that was recorded as a graph where that is possible (no
launch gaps), after warm-up; a CPU by the clock.
"""

import time
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], object]


class Stopwatch:
    def __init__(self, device: torch.device, num_samples: int) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.num_samples = num_samples

    def milliseconds(self, runs: Sequence[Run], *, can_capture: bool) -> list[float]:
        """Of one run, in several rounds of all of them one after the other.

        Work that is to find nothing in the L2 cache is given as several runs on different memory.

        Args:
            can_capture: whether they may be recorded as a CUDA graph.
        """
        with torch.inference_mode():
            for run in runs:
                run()
            once = runs
            if can_capture and self.is_gpu:
                once = self._captured(runs)
            self._round(once)
            return [self._round(once) / len(runs) for _ in range(self.num_samples)]

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
