"""What these cores can do: matrix products in bf16 and fp32, and reading memory.

Run by bench_throughput.py. Best of several tries each, since a disturbed try says nothing of the
machine.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol import Done, Work, serve

GEMM_SIZE = 2048
# Without bf16 instructions a product of that size takes a minute: smaller ones tell the rate too.
SMALLEST_GEMM = 128
SLOW_S = 0.25
MEMORY_BYTES = 1 << 30
TRIES = 8


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], str]:
    import torch

    num_cores = len(settings["cores"])
    torch.set_num_threads(num_cores)

    def run(work: Work) -> Done:
        details = {
            "bf16_gflops": gemm_gflops(torch.bfloat16),
            "fp32_gflops": gemm_gflops(torch.float32),
            "read_gb_per_s": read_gb_per_s(),
        }
        return Done([], 0.0, details)

    def gemm_gflops(dtype: torch.dtype) -> float:
        """At the largest size up to GEMM_SIZE whose half takes no longer than SLOW_S."""
        size = SMALLEST_GEMM
        while True:
            pair = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
            multiply = partial(torch.mm, *pair)
            start_s = time.perf_counter()
            multiply()
            if size == GEMM_SIZE or time.perf_counter() - start_s > SLOW_S:
                return 2 * size**3 / best(multiply, num_cores) / 1e9
            size *= 2

    def read_gb_per_s() -> float:
        columns = 1 << 14
        matrix = torch.zeros(MEMORY_BYTES // 4 // columns, columns).fill_(1.0)
        vector = torch.ones(columns)
        # A matrix-vector product and a sum, whichever reads faster.
        mv_s = best(lambda: torch.mv(matrix, vector), num_cores)
        seconds = min(mv_s, best(matrix.sum, num_cores))
        return MEMORY_BYTES / seconds / 1e9

    return run, torch.__config__.show()


def best(call: Callable[[], object], num_cores: int) -> float:
    """Seconds of processor time a core: on an otherwise idle machine, the wall time."""
    times = []
    for _ in range(TRIES):
        start_s = time.process_time()
        call()
        times.append(time.process_time() - start_s)
    return min(times) / num_cores


if __name__ == "__main__":
    serve(load)
