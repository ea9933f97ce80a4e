"""`Linear`: all products with weights in the lean decoder, each by its fastest kernel.

On a CPU weights are packed once, into the layout that multiplies fastest; `layout` says which one
is used:
- Ours, for bf16, and for fp32 weights that bf16 can hold exactly (`kernels/cpu/linear.py`). On a
  CPU with AMX, which oneDNN uses well, bf16 has our layout only if it is faster in a trial, or if
  STEPSCOPE_CPU_LEVEL is set.
- oneDNN's, otherwise. It takes 0.5 to 0.8 of the time of `F.linear` with 1 to 16 rows, and the same
  time from 256 rows on (one core with AVX-512).
- None, with `F.linear`, if torch lacks oneDNN's packing operators, which are private.

On a GPU weights stay as they are. Several rows are multiplied by `F.linear`. One row, a decode of
one request, is multiplied either so or by our kernel (`kernels/triton/one_row.py`) in one of its
tiles. Which is faster depends on the shape, the GPU and the release of cuBLAS. So each shape is
tried once, when its first weight is loaded.
"""

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.cpu.library import LEVEL_VARIABLE
from stepscope.kernels.cpu.linear import TILE_INPUTS, HugePages, PackedLinear, is_usable
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
# Numbers of rows in a trial on a CPU, and how often: few and many count about as much.
TRIAL_ROWS = {256: 1, 16: 8, 1: 16}
TRIAL_WEIGHT = (1024, 2048)
# The number of rows for which oneDNN chooses its layout. A layout for 1 row is slow in fp32 with
# more rows; a layout for many rows is also good for few.
PACKED_FOR_ROWS = 16


class Linear:
    """Computes `x @ weight.T + bias` for x [rows, in_features], weight [out_features, in_features].

    Owns the weight: a caller that keeps it, too, may hold it in memory twice.

    Args:
        memory: where a weight in our own packed layout goes; None: ordinary memory.
        is_gated: compute `silu(x @ gate.T) * (x @ up.T)`, plus biases; `weight` has gate's rows,
            then up's.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugePages | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        if is_usable(weight) and (weight.dtype is torch.float32 or _beats_onednn(weight)):
            packed = PackedLinear(weight, bias, memory, is_gated=is_gated)
            self.layout, self.num_bytes, self._multiply = "packed", packed.num_bytes, packed
            return
        self.num_bytes = weight.numel() * weight.itemsize
        if _onednn_packs(weight):
            self.layout = "oneDNN-packed"
            product = _onednn(weight, bias)
        else:
            self.layout = "plain"
            product = partial(F.linear, weight=weight, bias=bias)
        several = (lambda x: silu_mul(product(x))) if is_gated else product
        one = one_row_product(weight, bias, is_gated=is_gated)
        self._multiply = several if one is None else lambda x: (one if len(x) == 1 else several)(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


def _onednn_packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not all(map(partial(hasattr, operators), ("_reorder_linear_weight", "_linear_pointwise"))):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return partial(linear, W=ordered, B=bias, attr="none", scalars=[], algorithm="")


def _beats_onednn(weight: torch.Tensor) -> bool:
    """Whether our product is faster by this weight in bf16: where the CPU has AMX, by a trial."""
    if not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return True
    if os.environ.get(LEVEL_VARIABLE):  # our kernels of a level were asked for
        return True
    return weight.shape[1] % TILE_INPUTS == 0 and _tiles_beat_onednn()


@functools.cache
def _tiles_beat_onednn() -> bool:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several may wait for each other, for longer than the products take
    try:
        # From a generator of its own: a trial must not change what a model samples.
        generator = torch.Generator().manual_seed(0)
        random = partial(torch.randn, generator=generator, dtype=torch.bfloat16)
        with torch.inference_mode():
            weight = random(TRIAL_WEIGHT)
            onednn = _onednn(weight, None)
            packed = PackedLinear(weight, None, HugePages(weight.nbytes))
            inputs = [
                (random(num_rows, weight.shape[1]), weight, None)
                for num_rows, count in TRIAL_ROWS.items()
                for _ in range(count)
            ]
            kernels = {"packed": lambda x, *_: packed(x)}
            return fastest(lambda x, *_: onednn(x), kernels, inputs, _cpu_ms) is not None
    except Exception as error:  # noqa: BLE001 - oneDNN may raise anything
        log.warning("our products of bf16 were not tried against oneDNN: %s", error)
        return True
    finally:
        torch.set_num_threads(threads)


def one_row_product(
    weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what multiplies a row `[1, K]` by `weight` faster than `F.linear`; None: nothing does.

    Args:
        is_gated: `silu_mul` of the product; `weight` has gate's rows, then up's.
    """
    is_served = weight.is_cuda and weight.itemsize == 2 and weight.is_contiguous()
    if not is_served or weight.nbytes < MIN_BYTES:
        return None
    kernel = _choice(weight.device, weight.shape, weight.dtype, bias is not None, is_gated)
    return None if kernel is None else partial(kernel, weight=weight, bias=bias)


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
        random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        with torch.inference_mode():
            x = random(1, size) * size**-0.5
            bias = random(num_rows) if has_bias else None
            inputs = [(x, weight, bias) for weight in random(num_copies, num_rows, size)]
            kernels = {tile: partial(one_row, tile=tile, is_gated=is_gated) for tile in TILES}
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
            log.warning("product %s is wrong here (off by %.2g in a trial)", name, error)

    def multiply(product: Product) -> None:
        for each in inputs:
            product(*each)

    times: dict[Any, list[float]] = {name: [] for name in products}
    for _ in range(ROUNDS):
        for name, product in products.items():
            times[name].append(clock(partial(multiply, product), len(inputs)))
    medians = {name: 1e3 * statistics.median(each) / len(inputs) for name, each in times.items()}
    best = min(medians, key=lambda name: medians[name])
    log.info("products by %s: %s, of %s us", tuple(inputs[0][1].shape), best or "torch", medians)
    return None if best is None else products[best]


def _cpu_ms(run: Callable[[], object], num_products: int) -> float:
    begin_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin_ns) / 1e6


def _gpu_ms(run: Callable[[], object], num_products: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CYCLES * num_products)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
