"""What these cores can do: matrix products in bf16 and fp32, and reading memory.

Run by bench_throughput.py. Best of several tries each, since a disturbed try says nothing of the
machine; in processor time a core, which on an otherwise idle machine is the wall time.
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

    def best_s(call: Callable[[], object]) -> float:
        times = []
        for _ in range(TRIES):
            start_s = time.process_time()
            call()
            times.append(time.process_time() - start_s)
        return min(times) / num_cores

    def gemm_gflops(dtype: torch.dtype) -> float:
        """At the largest size up to GEMM_SIZE whose half takes no longer than SLOW_S."""
        size = SMALLEST_GEMM
        while True:
            pair = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
            multiply = partial(torch.mm, *pair)
            start_s = time.perf_counter()
            multiply()
            if size == GEMM_SIZE or time.perf_counter() - start_s > SLOW_S:
                return 2 * size**3 / best_s(multiply) / 1e9
            size *= 2

    def read_gb_per_s() -> float:
        columns = 1 << 14
        matrix = torch.zeros(MEMORY_BYTES // 4 // columns, columns).fill_(1.0)
        vector = torch.ones(columns)
        # A matrix-vector product and a sum, whichever reads faster.
        return (
            MEMORY_BYTES / min(map(best_s, (partial(torch.mv, matrix, vector), matrix.sum))) / 1e9
        )

    def run(work: Work) -> Done:
        details = {
            "bf16_gflops": gemm_gflops(torch.bfloat16),
            "fp32_gflops": gemm_gflops(torch.float32),
            "read_gb_per_s": read_gb_per_s(),
        }
        return Done([], 0.0, details)

    return run, torch.__config__.show()


if __name__ == "__main__":
    serve(load)
