"""Linear layers: our packed product beside oneDNN's packed one and F.linear, in turns.

    python tests/bench/bench_linear.py [--dtype float32] [--threads 1] [--rows 1 2 4 8 16 64 256]

In bf16, or in fp32 by weights that are values of bf16: ours keeps those in bf16.

Weights are taken from 64 MB of copies, so that they come from memory as in a model. The least time
of each is shown: the machine may be shared. The shapes are those of layers of 4.5 to 160 M models.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

SHAPES = ((256, 1024), (384, 2048), (1024, 384), (576, 3072), (1536, 576), (576, 49152))
COPIES_BYTES = 64 << 20
SECONDS = 0.4  # for each line
NO_EPILOGUE = {"attr": "none", "scalars": [], "algorithm": ""}

Layer = Callable[[Any], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256, 1024])
    options = parser.parse_args()
    import torch

    from stepscope.kernels.cpu.linear import PackedLinear, is_usable

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if not is_usable(torch.zeros(2, 2, dtype=dtype)):
        print(f"this CPU or this build has no product of ours in {dtype}: nothing to compare")
        return
    print(f"{dtype}, {options.threads} threads; us, and GB/s of weights or GFLOP/s of ours")
    print(f"{'in x out':>12} {'rows':>5} {'ours':>8} {'oneDNN':>8} {'F.linear':>8}", end="")
    print(f" {'oneDNN/ours':>12} {'GB/s':>6} {'GFLOP/s':>8}")
    for size, num_outputs in SHAPES:
        weight = torch.randn(num_outputs, size).bfloat16().to(dtype)
        copies = min(40, max(1, COPIES_BYTES // (2 * weight.numel())))
        onednn = torch.ops.mkldnn._linear_pointwise.default
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for _ in range(copies)]
        layers: list[list[Layer]] = [
            [PackedLinear(weight, None) for _ in range(copies)],
            [partial(onednn, W=each, B=None, **NO_EPILOGUE) for each in packed],
            [partial(torch.nn.functional.linear, weight=weight.clone()) for _ in range(copies)],
        ]
        for num_rows in options.rows:
            if num_rows * num_outputs > 1 << 24:
                continue
            x = torch.randn(num_rows, size).to(dtype)
            with torch.inference_mode():
                times = least(layers, x)
            mine = times[0]
            work = weight.numel() * 2
            print(
                f"{f'{size} x {num_outputs}':>12} {num_rows:5} "
                + " ".join(f"{seconds * 1e6:8.1f}" for seconds in times)
                + f" {times[1] / mine:12.2f} {work / mine / 1e9:6.1f}"
                + f" {work * num_rows / mine / 1e9:8.0f}",
                flush=True,
            )


def least(layers: list[list[Layer]], x: object) -> list[float]:
    """The shortest time of each contender, in seconds; all have equally many layers."""
    best = [float("inf")] * len(layers)
    end = time.perf_counter() + SECONDS
    turn = 0
    while time.perf_counter() < end or turn < 3:
        turn += 1
        for i, copies in enumerate(layers):
            layer = copies[turn % len(copies)]
            start = time.perf_counter()
            layer(x)
            best[i] = min(best[i], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
