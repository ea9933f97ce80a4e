"""Rates of GPUs from their makers' data sheets, for estimating step times.

All rates are for dense products (no sparsity); those of RTX cards are with fp32 accumulation, as
inference uses.
"""

from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import ConfigError


class GpuRates(Struct, frozen=True):
    """Data sheet rates of one GPU."""

    name: str
    bytes_per_s: float  # memory bandwidth
    bf16_flops: float  # per second
    fp8_flops: float | None  # None: it has no FP8 units and computes in bf16
    memory_gib: int
    link_bytes_per_s: float  # to other GPUs, in each direction


GPUS = {  # and the data sheet or white paper
    # NVIDIA H100 and H200 Tensor Core GPU data sheets; sparse rates halved
    "h100": GpuRates("H100 SXM", 3.35e12, 989.4e12, 1978.9e12, 80, 450e9),
    "h200": GpuRates("H200 SXM", 4.8e12, 989.4e12, 1978.9e12, 141, 450e9),
    # NVIDIA A100 Tensor Core GPU data sheet
    "a100": GpuRates("A100 SXM 80 GB", 2.039e12, 312e12, None, 80, 300e9),
    # NVIDIA L40S data sheet; PCIe 4.0 x16
    "l40s": GpuRates("L40S", 0.864e12, 362.05e12, 733e12, 48, 32e9),
    # NVIDIA DGX B200 data sheet, an eighth of it; sparse rates halved
    "b200": GpuRates("B200", 8.0e12, 2250e12, 4500e12, 180, 900e9),
    # AMD Instinct MI300X data sheet
    "mi300x": GpuRates("MI300X", 5.3e12, 1307.4e12, 2614.9e12, 192, 448e9),
    # NVIDIA Ada GPU Architecture white paper, appendix A; PCIe 4.0 x16
    "rtx4090": GpuRates("RTX 4090", 1.008e12, 165.2e12, 330.3e12, 24, 32e9),
    # NVIDIA RTX Blackwell GPU Architecture white paper, appendix A; PCIe 5.0 x16
    "rtx5090": GpuRates("RTX 5090", 1.792e12, 209.5e12, 419e12, 32, 64e9),
}


def gpu_named(name: str) -> GpuRates:
    """Find a GPU by its name in `GPUS`; ignores case, spaces, dashes and underscores."""
    plain = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    gpu = GPUS.get(plain)
    if gpu is None:
        raise ConfigError(
            "unknown_gpu",
            f"no GPU {name!r} is known; there are: {', '.join(GPUS)} (for another one give a fit "
            "of a recording, or measured points)",
        )
    return gpu
