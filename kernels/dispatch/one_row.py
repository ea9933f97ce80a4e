"""Chooses, by measurement on the GPU, how a weight multiplies one row: a decode of one request.

Either our kernel (`kernels/triton/one_row.py`) in one of its tiles, or `F.linear`. Which is faster
depends on the shape, the GPU and the release of cuBLAS. So each shape is tried once, when its first
weight is loaded.
"""

import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.dispatch.fused import silu_mul

log = logging.getLogger("stepscope.kernels")

Product = Callable[..., torch.Tensor]  # of x, weight and bias or None

# Smaller weights are read faster than a kernel starts.
MIN_BYTES = 1 << 20
# A trial multiplies by copies of a weight in turn, so that a GPU's cache (50 MB on an H200) holds
# as little of them as of a whole model.
TRIAL_BYTES = 256 << 20
ROUNDS = 5
# Largest error over the largest result. Rounding twice in bf16 causes at most 0.012.
TOLERANCE = 0.02
# Cycles (about 50 us) that the GPU waits for the host to make a launch of a trial.
LAUNCH_CYCLES = 100_000


def one_row_product(
    weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what multiplies a row `[1, K]` by `weight` faster than `F.linear`; None: nothing does.

    Args:
        is_gated: `silu_mul` of the product; `weight` has gate's rows, then up's.
    """
    if not (weight.is_cuda and weight.itemsize == 2 and weight.is_contiguous()):
        return None
    if weight.nbytes < MIN_BYTES:
        return None
    kernel = _choice(weight.device, weight.shape, weight.dtype, bias is not None, is_gated)
    return None if kernel is None else functools.partial(kernel, weight=weight, bias=bias)


@functools.cache
def _choice(
    device: torch.device, shape: torch.Size, dtype: torch.dtype, has_bias: bool, is_gated: bool
) -> Product | None:
    num_rows, size = shape
    num_copies = -(-TRIAL_BYTES // (num_rows * size * dtype.itemsize))
    try:
        from stepscope.kernels.triton.one_row import TILES, one_row

        # From a generator of its own: a trial must not change what a model samples.
        generator = torch.Generator(device).manual_seed(0)
        random = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
        with torch.inference_mode():
            x = random(1, size) * size**-0.5
            bias = random(num_rows) if has_bias else None
            inputs = [(x, weight, bias) for weight in random(num_copies, num_rows, size)]
            kernels = {
                tile: functools.partial(one_row, tile=tile, is_gated=is_gated) for tile in TILES
            }
            plain = (lambda *args: silu_mul(F.linear(*args))) if is_gated else F.linear
            return fastest(plain, kernels, inputs, _gpu_ms)
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        log.warning("no kernel for one row by %s, torch takes its place: %s", tuple(shape), error)
        return None


def fastest(
    plain: Product,
    kernels: Mapping[Any, Product],
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    clock: Callable[[Callable[[], object], int], float],
) -> Product | None:
    """Return the fastest of `kernels` that is right, or None if `plain` is at least as fast.

    Args:
        inputs: arguments of the products; all are multiplied in a trial.
        clock: runs a function that makes so many products, and returns the time it takes in ms.
    """
    expected = plain(*inputs[0]).float()
    products: dict[Any, Product] = {None: plain}
    for name, kernel in kernels.items():
        error = float((kernel(*inputs[0]).float() - expected).abs().max() / expected.abs().max())
        if error <= TOLERANCE:
            products[name] = kernel
        else:
            log.warning("one row: %s is wrong here (off by %.2g in a trial)", name, error)

    def multiply(product: Product) -> None:
        for each in inputs:
            product(*each)

    times: dict[Any, list[float]] = {name: [] for name in products}
    for _ in range(ROUNDS):
        for name, product in products.items():
            times[name].append(clock(functools.partial(multiply, product), len(inputs)))
    medians = {name: 1e3 * statistics.median(each) / len(inputs) for name, each in times.items()}
    best = min(medians, key=lambda name: medians[name])
    log.info("one row by %s: %s, of %s us", tuple(inputs[0][1].shape), best or "torch", medians)
    return None if best is None else products[best]


def _gpu_ms(run: Callable[[], object], num_products: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CYCLES * num_products)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
