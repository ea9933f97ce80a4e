"""Rates of GPUs from their makers' data sheets, for estimating step times.

All rates are for dense products (no sparsity); those of RTX cards are with fp32 accumulation, as
inference uses.
"""

import re

from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import ConfigError


class GpuRates(Struct, frozen=True, kw_only=True):
    """Data sheet rates of one GPU."""

    name: str
    bytes_per_s: float  # memory bandwidth
    bf16_flops: float  # per second
    fp8_flops: float | None  # None: it has no FP8 units and computes in bf16
    memory_gib: int
    link_bytes_per_s: float  # to other GPUs, in each direction
    source: str


GPUS = {
    "h100": GpuRates(
        name="H100 SXM",
        bytes_per_s=3.35e12,
        bf16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_gib=80,
        link_bytes_per_s=450e9,
        source="NVIDIA H100 Tensor Core GPU data sheet; sparse rates halved",
    ),
    "h200": GpuRates(
        name="H200 SXM",
        bytes_per_s=4.8e12,
        bf16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_gib=141,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 Tensor Core GPU data sheet; sparse rates halved",
    ),
    "a100": GpuRates(
        name="A100 SXM 80 GB",
        bytes_per_s=2.039e12,
        bf16_flops=312e12,
        fp8_flops=None,
        memory_gib=80,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 Tensor Core GPU data sheet",
    ),
    "l40s": GpuRates(
        name="L40S",
        bytes_per_s=0.864e12,
        bf16_flops=362.05e12,
        fp8_flops=733e12,
        memory_gib=48,
        link_bytes_per_s=32e9,
        source="NVIDIA L40S data sheet; PCIe 4.0 x16",
    ),
    "b200": GpuRates(
        name="B200",
        bytes_per_s=8.0e12,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_gib=180,
        link_bytes_per_s=900e9,
        source="NVIDIA DGX B200 data sheet, an eighth of it; sparse rates halved",
    ),
    "mi300x": GpuRates(
        name="MI300X",
        bytes_per_s=5.3e12,
        bf16_flops=1307.4e12,
        fp8_flops=2614.9e12,
        memory_gib=192,
        link_bytes_per_s=448e9,
        source="AMD Instinct MI300X data sheet",
    ),
    "rtx4090": GpuRates(
        name="RTX 4090",
        bytes_per_s=1.008e12,
        bf16_flops=165.2e12,
        fp8_flops=330.3e12,
        memory_gib=24,
        link_bytes_per_s=32e9,
        source="NVIDIA Ada GPU Architecture white paper, appendix A; PCIe 4.0 x16",
    ),
    "rtx5090": GpuRates(
        name="RTX 5090",
        bytes_per_s=1.792e12,
        bf16_flops=209.5e12,
        fp8_flops=419e12,
        memory_gib=32,
        link_bytes_per_s=64e9,
        source="NVIDIA RTX Blackwell GPU Architecture white paper, appendix A; PCIe 5.0 x16",
    ),
}


# What a driver, a cloud or a scheduler's label adds to a GPU's name; rates are of the SXM variant.
_ADDED = re.compile(r"nvidia|amd|geforce|instinct|tesla|gpu|hbm\d?e?|oam|vf|sxm\d?|(\d+)gi?b")


def gpu_named(name: str) -> GpuRates:
    """Find a GPU by its name in `GPUS`, or as its driver prints it: "NVIDIA H100 80GB HBM3".

    Ignores case, spaces, dashes and underscores.

    Raises:
        ConfigError: there is no such GPU, or only one with other rates (PCIe, half the memory).
    """
    words = re.split(r"[\s_-]+", name.strip().lower())
    added = [_ADDED.fullmatch(word) for word in words]
    named = "".join(word for word, is_added in zip(words, added, strict=True) if not is_added)
    gpu = GPUS.get("".join(words)) or GPUS.get(named)
    sizes = [int(found[1]) for found in added if found is not None and found[1] is not None]
    # A driver says GB for GiB, and rounds.
    if gpu is not None and any(abs(size / gpu.memory_gib - 1) > 0.1 for size in sizes):
        gpu = None
    if gpu is None:
        raise ConfigError(
            "unknown_gpu",
            f"no GPU {name!r} is known; there are: {', '.join(GPUS)} (for another one give a fit "
            "of a recording, or measured points)",
        )
    return gpu
