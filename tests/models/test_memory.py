"""KV memory: the settings users write, and refusals that say what is needed."""

import pytest

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import (
    CPU_SHARE_CAP_BYTES,
    DeviceUse,
    KVShape,
    device_kv_blocks,
    kv_memory_bytes,
    num_kv_blocks,
)

GIB = 1 << 30
SHAPE = KVShape(num_layers=6, num_kv_heads=2, head_dim=64, dtype_bytes=2)


def blocks(kv_memory: str, max_model_len: int = 8192, free: int = 8 * GIB, **config: int) -> int:
    settings = EngineConfig(kv_memory=kv_memory, **config)
    return num_kv_blocks(settings, SHAPE, max_model_len, free)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("512MB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("2g", 2 * GIB),
        ("4096", 4096),
        ("20%", 8 * GIB // 5),
        ("100%", 8 * GIB),
        (" 0.5 % ", 8 * GIB // 200),
    ],
)
def test_kv_memory_may_be_a_size_or_a_share(setting: str, expected: int) -> None:
    assert kv_memory_bytes(setting, 8 * GIB, on_gpu=True) == expected


@pytest.mark.parametrize("setting", ["", "much", "-1GB", "12XB", "0", "0%", "101%", "1e9", "5GB%"])
def test_kv_memory_that_is_neither_size_nor_share_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory (is|must be)") as caught:
        kv_memory_bytes(setting, 8 * GIB, on_gpu=True)
    assert "\n" not in str(caught.value)


def test_more_kv_memory_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory=9GB is more than the 8GB that are free"):
        kv_memory_bytes("9GB", 8 * GIB)
    with pytest.raises(ConfigError, match=r"kv_memory=61GB is more than the 60GB that are free"):
        gpu_blocks(kv_memory="61GB")


def test_on_a_large_host_a_share_is_capped_and_a_size_is_not() -> None:
    assert kv_memory_bytes("50%", 8 * GIB) == CPU_SHARE_CAP_BYTES
    assert kv_memory_bytes("5%", 8 * GIB) < CPU_SHARE_CAP_BYTES
    assert kv_memory_bytes("4GB", 8 * GIB) == 4 * GIB


def test_a_kv_block_holds_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes(16) == 2 * 6 * 2 * 64 * 16 * 2
    assert blocks("48MB", seq_capacity=256) == (48 << 20) // SHAPE.block_bytes(16)


def test_there_are_never_more_kv_blocks_than_can_be_in_use() -> None:
    assert blocks("4GB", max_model_len=1000, seq_capacity=3) == 3 * 63


def test_kv_memory_too_small_for_one_request_names_the_size_needed() -> None:
    with pytest.raises(ConfigError) as caught:
        blocks("10MB")
    message = str(caught.value)
    assert "max_model_len=8192 tokens needs 24MB" in message
    assert "kv_memory=10MB gives 10MB" in message
    assert "\n" not in message
    # Both ways out that it names work.
    assert blocks("24MB") == 512
    with pytest.raises(ConfigError):
        blocks(str((24 << 20) - 1))
    suggested = int(message.split("--max-model-len ")[1])
    assert blocks("10MB", max_model_len=suggested) >= suggested // 16


def test_without_room_for_a_single_kv_block_a_smaller_model_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory=1KB gives 1KB: .* or a smaller model"):
        blocks("1KB")


# A GPU of 100 GiB: 60 GiB are left of 90 %.
USE = DeviceUse(total=100 * GIB, others=GIB, weights=20 * GIB, activations=6 * GIB, graphs=3 * GIB)


def gpu_blocks(use: DeviceUse = USE, **config: object) -> int:
    settings = EngineConfig(seq_capacity=65536, **config)  # type: ignore[arg-type]
    return device_kv_blocks(settings, SHAPE, 8192, use)


def test_on_a_gpu_the_kv_cache_gets_the_rest_of_the_memory_utilization() -> None:
    block = SHAPE.block_bytes(16)
    assert gpu_blocks() == 60 * GIB // block
    assert gpu_blocks(gpu_memory_utilization=0.5) == 20 * GIB // block
    assert gpu_blocks(kv_memory="50%") == 30 * GIB // block
    assert gpu_blocks(kv_memory="7GB") == 7 * GIB // block
    # Of a small model no more than can be in use.
    assert device_kv_blocks(EngineConfig(seq_capacity=2), SHAPE, 8192, USE) == 2 * 512


def test_on_a_cpu_auto_kv_memory_is_a_share_of_free_memory() -> None:
    assert kv_memory_bytes("auto", 8 * GIB) == 8 * GIB // 10
    assert blocks("auto") == blocks("10%")


def test_without_gpu_room_for_the_kv_cache_the_error_says_what_uses_the_memory() -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_blocks(gpu_memory_utilization=0.2)
    assert caught.value.code == "gpu_memory_utilization"
    message = str(caught.value)
    assert "\n" not in message
    assert "gpu_memory_utilization=0.2 allows 20GB" in message
    assert "100GB total, 1GB others, 20GB weights, 6GB activations, 3GB graphs" in message
    assert "raise it" in message


def test_without_gpu_room_for_one_request_the_error_says_what_to_lower() -> None:
    tight = USE._replace(weights=80 * GIB - (10 << 20))
    with pytest.raises(ConfigError, match=r"kv_memory=auto gives 10MB: .*--max-model-len"):
        gpu_blocks(tight)
