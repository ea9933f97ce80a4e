"""Devices: only a real lack of memory is reported as one, in a line that says what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stepscope.engine.execution import devices
from stepscope.engine.execution.devices import find_device, memory_for
from stepscope.engine.execution.loading import load_runner
from stepscope.engine.execution.runner import LaunchedStep, ModelRunner
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.scheduling.step import DeviceLostError, ScheduledStep
from stepscope.kernels.dispatch import backends
from tests.support.engines.tiny_runner import load_tiny

# As torch words it.
FULL = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.10 GiB is free. Process 7 has 136.70 GiB memory in use."
)


def test_an_out_of_memory_error_says_what_needed_memory_and_which_setting_to_lower() -> None:
    with (
        pytest.raises(ConfigError) as caught,
        memory_for("the KV cache", "lower --gpu-memory-utilization"),
    ):
        raise torch.OutOfMemoryError(FULL)
    assert caught.value.code == "device_memory"
    assert str(caught.value) == (
        "the GPU has no memory for the KV cache (20.00 GiB more were needed): "
        "lower --gpu-memory-utilization"
    )


def test_a_start_whose_first_steps_find_no_memory_ends_with_a_line_that_says_what_to_lower(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program takes memory after the trial, or --gpu-memory-utilization is 1."""

    def launch(self: ModelRunner, step: ScheduledStep) -> LaunchedStep:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(ModelRunner, "launch_now", launch)
    with pytest.raises(ConfigError, match="no memory for the first steps: lower --gpu-memory-util"):
        load_tiny(tiny_checkpoint("qwen3"))


def test_on_a_gpu_that_no_fast_attention_serves_the_log_says_why(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(devices, "find_device", torch.device)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(backends, "_probe", lambda each, *_: (each.name == "torch", "too old"))

    def no_further(max_model_len: int) -> None:
        raise NotImplementedError

    config = EngineConfig(model=str(tiny_checkpoint("qwen3")), device="cuda")
    with pytest.raises(NotImplementedError):
        load_runner(config, lambda what, share: None, no_further)
    assert "no CUDA graphs on this GPU: too old; flash-attn: too old; triton: too" in caplog.text


def test_a_launch_that_fails_tells_a_gpu_that_has_failed_from_a_step_that_has(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access, every call of CUDA fails until the process ends."""
    runner = load_tiny(tiny_checkpoint("qwen3"))
    runner.device = torch.device("cuda")
    failure = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(ModelRunner, "launch_now", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(RuntimeError, match="illegal") as caught:
        runner.launch(ScheduledStep(0, []))
    assert caught.value is failure
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLostError, match=r"any more: CUDA error: an illegal .* encountered$"):
        runner.launch(ScheduledStep(0, []))


def test_errors_other_than_out_of_memory_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"), memory_for("it", "nothing"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("setting", "current"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)]
)
def test_the_gpu_that_a_setting_names_becomes_the_current_device(
    setting: str, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    assert find_device(setting).type == "cuda"
    assert chosen == [current]
    with pytest.raises(ConfigError, match="sees 2 GPUs"):
        find_device("cuda:2")
