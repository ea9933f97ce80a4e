"""(a) What the device can do at most: a large copy within its memory, and a large product.

Shares of the other parts are of these, measured in the same run. A copy's bytes are those read and
those written; a product's operations are 2 * side^3, on random numbers in bf16.
"""

import torch

from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.execution.machine.devices import free_bytes


def measure(bench: Bench) -> None:
    with bench.attempt("copy"):
        # A quarter of what is free, if that is less: a small GPU is to be measured too.
        size = min(bench.sizes.copy_bytes, free_bytes(bench.device) // 4)
        source = torch.randint(0, 100, (size,), dtype=torch.int8, device=bench.device)
        target = torch.empty_like(source)
        samples = bench.stopwatch.milliseconds([lambda: target.copy_(source)], can_capture=False)
        bench.found("copy", samples, bytes=2 * size)
    with bench.attempt("gemm"):
        side = bench.sizes.product_side
        a, b = torch.randn(2, side, side, device=bench.device).to(torch.bfloat16)
        out = torch.empty_like(a)
        samples = bench.stopwatch.milliseconds(
            [lambda: torch.mm(a, b, out=out)] * 4, can_capture=False
        )
        bench.found("gemm", samples, flops=2 * side**3, side=side, dtype="bfloat16")
