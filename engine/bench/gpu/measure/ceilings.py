"""(a) The device's ceilings: the rates of a large copy in its memory and a large matrix product.

Other parts give their results as shares of these rates, measured in the same run. The rate of the
copy counts bytes read and bytes written. The product counts 2 * side^3 operations, on random
numbers in bf16.
"""

import torch

from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.execution.machine.devices import free_bytes


def measure(bench: Bench) -> None:
    with bench.attempt("copy"):
        # At most a quarter of the free memory, so that small GPUs can be measured too.
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
