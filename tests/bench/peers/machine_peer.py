"""What these cores can do: matrix products in bf16 and fp32, and reading memory.

Run by bench_throughput.py. Best of several tries each, since a disturbed try says nothing of the
machine.
"""

import time
from collections.abc import Callable
from typing import Any

from protocol import Done, Work, serve

GEMM_SIZE = 2048
MEMORY_BYTES = 1 << 30
TRIES = 8


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], dict[str, Any]]:
    import torch

    torch.set_num_threads(len(settings["cores"]))

    def run(work: Work) -> Done:
        details = {
            "bf16_gflops": gemm_gflops(torch.bfloat16),
            "fp32_gflops": gemm_gflops(torch.float32),
            "read_gb_per_s": read_gb_per_s(),
        }
        return Done([], 0.0, 0.0, details)

    def gemm_gflops(dtype: torch.dtype) -> float:
        a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        return 2 * GEMM_SIZE**3 / best(lambda: torch.mm(a, b)) / 1e9

    def read_gb_per_s() -> float:
        columns = 1 << 14
        matrix = torch.zeros(MEMORY_BYTES // 4 // columns, columns).fill_(1.0)
        vector = torch.ones(columns)
        # A matrix-vector product and a sum, whichever reads faster.
        seconds = min(best(lambda: torch.mv(matrix, vector)), best(matrix.sum))
        return MEMORY_BYTES / seconds / 1e9

    return run, {"software": f"torch {torch.__version__}", "how": torch.__config__.show()}


def best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times)


if __name__ == "__main__":
    serve(load)
