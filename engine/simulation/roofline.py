"""`RooflineModel`: step times from the bytes and operations of a step, and a GPU's rates.

The products with weights, and attention, each take the time of their bytes or of their operations
at the data sheet's rates, whichever is longer, times a coefficient above 1. Each step, each row,
and each sum that tensor parallelism forms over the GPUs also cost a fixed time. In a mixture of
experts, only the experts that the step's tokens choose are read.

Rates are for dense products (no sparsity); those of RTX cards with fp32 accumulation.
"""

import re

from msgspec import Struct

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.model_shape import ModelShape
from stepscope.engine.simulation.step_time import StepShape, StepTime


class GpuRates(Struct, frozen=True):
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


TERMS = ("weights", "attention", "step", "row_layer")  # the terms with fitted coefficients
_EXCHANGES = 2  # in each layer: after attention and after the MLP
_ACTIVATION_BYTES = 2
_MEMORY_SHARE = 0.9  # that the engine uses, like vLLM's `gpu_memory_utilization`
_ACTIVATION_ROOM = 1.7e9  # bytes on each GPU for activations: about what vLLM 0.19 reserves


class RooflineCoefficients(Struct, frozen=True, kw_only=True):
    """Factors on data sheet times: a fit to 13 public runs of vLLM 0.15.1 on H100."""

    weights: float = 1.309  # factor on the time of all products with weights
    attention: float = 1.068  # factor on the time of attention
    step_us: float = 837.0  # fixed cost of each step
    row_layer_us: float = 0.858  # cost of each row in each layer
    # Assumed, not fitted: the latency of an exchange between GPUs, and the best share of the peak
    # rate that products reach, before the factors above.
    exchange_us: float = 5.0
    matmul_share: float = 0.8
    pairs_share: float = 0.5


class RooflineModel:
    """A `StepTimeModel` of a model on `tensor_parallel` GPUs.

    Raises ConfigError: the model's heads cannot be split over `tensor_parallel` GPUs.
    """

    def __init__(
        self,
        gpu: GpuRates,
        shape: ModelShape,
        tensor_parallel: int = 1,
        coefficients: RooflineCoefficients | None = None,
    ) -> None:
        if tensor_parallel < 1 or shape.num_heads % tensor_parallel:
            raise ConfigError(
                "bad_tensor_parallel",
                f"{shape.num_heads} heads of {shape.name} cannot be split over {tensor_parallel} "
                "GPUs: take a divisor",
            )
        self.name = f"{shape.name} on {f'{tensor_parallel} x ' * (tensor_parallel > 1)}{gpu.name}"
        self._coefficients = coefficients or RooflineCoefficients()
        self._shape = shape
        # The times of single operations and reads, on all GPUs together.
        num_gpus = tensor_parallel
        read_s = 1 / (gpu.bytes_per_s * num_gpus)
        bf16_s = 2 / (gpu.bf16_flops * num_gpus * self._coefficients.matmul_share)
        fp8_s = bf16_s * gpu.bf16_flops / gpu.fp8_flops if gpu.fp8_flops else bf16_s
        attention_s = fp8_s if shape.attention_bytes == 1 else bf16_s
        mlp_s = fp8_s if shape.mlp_bytes == 1 else bf16_s
        dense_bytes = shape.weight_bytes - (
            shape.expert_weights * shape.num_experts * shape.mlp_bytes
        )
        self._read_dense_s = dense_bytes * read_s
        self._token_dense_s = shape.attention_weights * attention_s + shape.mlp_weights * mlp_s
        self._read_expert_s = shape.expert_weights * shape.mlp_bytes * read_s
        self._token_experts_s = shape.expert_weights * shape.num_experts_per_token * mlp_s
        self._read_key_s = shape.kv_bytes_per_token * read_s
        # Two products (scores and values), with two operations for each element of a head.
        operations = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        pairs_flops = gpu.bf16_flops * num_gpus * self._coefficients.pairs_share
        self._pair_s = operations / pairs_flops
        self._num_exchanges = _EXCHANGES * shape.num_layers * (num_gpus > 1)
        sent = shape.hidden_size * _ACTIVATION_BYTES * 2 * (num_gpus - 1) / num_gpus
        self._token_exchange_s = self._num_exchanges * sent / gpu.link_bytes_per_s

    def terms(self, shape: StepShape) -> tuple[float, ...]:
        """Return the numbers by which a step's coefficients are multiplied, in order of `TERMS`."""
        num_tokens = shape.num_tokens
        weights_s = max(self._read_dense_s, num_tokens * self._token_dense_s)
        if self._read_expert_s:
            used = self._shape.num_experts_used(num_tokens)
            weights_s += max(used * self._read_expert_s, num_tokens * self._token_experts_s)
        num_keys = shape.num_context_tokens + shape.num_prefill_context
        keys_s = num_keys * self._read_key_s
        attention_s = max(keys_s, shape.num_prefill_pairs * self._pair_s)
        return (weights_s, attention_s, 1.0, float(self._shape.num_layers * shape.num_rows))

    def exchange_s(self, num_tokens: int) -> float:
        """Seconds that tensor parallelism takes to add up the partial results of the GPUs."""
        latency_s = self._coefficients.exchange_us * 1e-6
        return self._num_exchanges * latency_s + num_tokens * self._token_exchange_s

    def step_time(self, shape: StepShape) -> StepTime:
        by = self._coefficients
        weights_s, attention_s, steps, row_layers = self.terms(shape)
        device_s = (
            by.weights * weights_s
            + by.attention * attention_s
            + (by.step_us * steps + by.row_layer_us * row_layers) * 1e-6
            + self.exchange_s(shape.num_tokens)
        )
        return StepTime(device_s, 0.0)


def num_kv_tokens(gpu: GpuRates, shape: ModelShape, tensor_parallel: int = 1) -> int:
    """Return the tokens of the KV cache beside weights and activations. May raise ConfigError."""
    room = gpu.memory_gib * 2**30 * tensor_parallel * _MEMORY_SHARE
    left = room - shape.memory_bytes - _ACTIVATION_ROOM * tensor_parallel
    if left <= 0:
        raise ConfigError(
            "model_too_large",
            f"the weights of {shape.name} take {shape.memory_bytes / 1e9:.0f} GB, and "
            f"{tensor_parallel} x {gpu.name} give {room / 1e9:.0f} GB: take more GPUs "
            "(tensor_parallel) or a smaller model",
        )
    return int(left / shape.kv_bytes_per_token)
