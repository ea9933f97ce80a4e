"""Computes the number of KV blocks from the settings, the memory and the model's shape."""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, WrongValue

# Cap of a share of the free memory: without it a small model would get far more than it can use,
# on a machine that also runs other programs. A size in bytes is not capped.
CPU_SHARE_CAP_BYTES = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the keys and values of one token in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def block_bytes(self, block_size: int) -> int:
        """Bytes of the keys and values of one block, in all layers."""
        return (
            2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * self.dtype_bytes
        )


def kv_memory_bytes(setting: str, free_bytes: int, *, on_gpu: bool = False) -> int:
    """Return the bytes that `setting` asks for.

    The setting is "auto", a size ("512MB", "1.5GiB") or a share of the free memory ("20%"). K, M, G
    and T are powers of 1024, with or without "i" and "B". "auto" is all that is free on a GPU. On a
    CPU it is a tenth, and a share (not a size) is at most `CPU_SHARE_CAP_BYTES`.

    Raises:
        WrongValue: the setting is neither a size nor a share, or it is zero.
        ConfigError: a size above the free memory.
    """
    text = setting.strip()
    if text == "auto":
        text = "100%" if on_gpu else "10%"
    if share := _SHARE.fullmatch(text):
        percent = float(share[1])
        if not 0 < percent <= 100:
            why = f"kv_memory must be above 0% and at most 100%, not {text}"
            raise WrongValue("kv_memory", why)
        wanted = int(free_bytes * percent / 100)
        return wanted if on_gpu else min(wanted, CPU_SHARE_CAP_BYTES)
    if size_bytes := _size_bytes(text):
        if size_bytes > free_bytes:
            raise ConfigError(
                "kv_memory",
                f"kv_memory={text} is more than the {_amount(free_bytes)} that are free: "
                "ask for less, or give a share such as 20%",
            )
        return size_bytes
    raise WrongValue(
        "kv_memory", f"kv_memory is auto, a size (512MB, 1.5GiB) or a share (20%), not {setting!r}"
    )


def memory_bytes(name: str, setting: str) -> int:
    """Return the bytes of a size such as "256MB" or "1.5GiB". Raises WrongValue."""
    wanted = _size_bytes(setting.strip())
    if not wanted:
        raise WrongValue(name, f"{name} is a size (256MB), not {setting!r}")
    return wanted


def _size_bytes(text: str) -> int | None:
    size = _SIZE.fullmatch(text)
    return None if size is None else int(float(size[1]) * _UNITS[size[2].upper()])


class DeviceUse(NamedTuple):
    """What the memory of a GPU is used for, beside the KV cache, in bytes."""

    total: int
    others: int  # other programs, and CUDA with its libraries in this process
    weights: int
    activations: int  # of the largest step
    graphs: int

    def in_words(self) -> str:
        return ", ".join(f"{_amount(n)} {name}" for name, n in self._asdict().items() if n)


def device_kv_blocks(
    config: EngineConfig, shape: KVShape, max_model_len: int, use: DeviceUse
) -> int:
    """Return the number of KV blocks on a GPU.

    They get the share `gpu_memory_utilization` of its memory, less what `use` lists: other
    programs, weights, activations and CUDA graphs.

    Raises ConfigError: that memory does not hold one request of `max_model_len` tokens.
    """
    share = config.gpu_memory_utilization
    allowed = int(use.total * share)
    left = allowed - use.others - use.weights - use.activations - use.graphs
    if left <= 0:
        raise ConfigError(
            "gpu_memory_utilization",
            f"gpu_memory_utilization={share:g} allows {_amount(allowed)}, and nothing of it is "
            f"left for the KV cache ({use.in_words()}): raise it, free memory that others use, "
            "lower --token-capacity or --seq-capacity, or take a smaller model",
        )
    return num_kv_blocks(config, shape, max_model_len, left, on_gpu=True)


def num_kv_blocks(
    config: EngineConfig,
    shape: KVShape,
    max_model_len: int,
    free_bytes: int,
    *,
    on_gpu: bool = False,
) -> int:
    """Return how many blocks the memory holds and requests can use. May raise ConfigError."""
    memory = kv_memory_bytes(config.kv_memory, free_bytes, on_gpu=on_gpu)
    block_bytes = shape.block_bytes(config.block_size)
    affordable = memory // block_bytes
    per_request = -(-max_model_len // config.block_size)
    if affordable < per_request:
        fits = affordable * config.block_size
        lower = f"--max-model-len {fits}" if fits else "a smaller model"
        raise ConfigError(
            "kv_memory",
            f"one request of max_model_len={max_model_len} tokens needs "
            f"{_amount(per_request * block_bytes, up=True)} of KV cache, but "
            f"kv_memory={config.kv_memory} gives {_amount(memory)}: "
            f"set --kv-memory {_amount(per_request * block_bytes, up=True)} or {lower}",
        )
    return min(affordable, config.seq_capacity * per_request)


def free_host_bytes() -> int:
    """Free memory of this machine in bytes, or of the container that we run in if that has less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text().strip()
    except OSError:
        return free
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _amount(num_bytes: int, *, up: bool = False) -> str:
    """Format bytes as `kv_memory` is written ("1.5GB"), rounded down, or up if `up` is set."""
    unit = next((u for u in ("GB", "MB") if num_bytes >= _UNITS[u[0]]), "KB")
    tenths = 10 * num_bytes / _UNITS[unit[0]]
    tenths = -int(-tenths // 1) if up else int(tenths)
    return f"{tenths / 10:g}{unit}"
