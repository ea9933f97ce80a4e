"""Builds a runner from a configuration: finds the device, loads the model, allocates memory."""

from collections.abc import Callable
from pathlib import Path

import torch

from stepscope.engine.execution.gpu_start import TRIAL_BLOCKS, prepare
from stepscope.engine.execution.machine import devices
from stepscope.engine.execution.machine.environment import keep_freed_memory, num_threads
from stepscope.engine.execution.machine.thread_choice import ThreadChoice
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.cache import gguf_checkpoint
from stepscope.engine.models.model import Model
from stepscope.engine.models.support import longest_request
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import kv_memory_bytes, num_kv_blocks
from stepscope.kernels.dispatch.backends import BackendUnavailableError, choose

Progress = Callable[[str, float], None]


def load_runner(
    config: EngineConfig,
    progress: Progress,
    check_length: Callable[[int], None] = lambda max_model_len: None,
) -> ModelRunner:
    """Find, load and warm up the model that `config` names, and return its runner.

    Args:
        check_length: called before the weights are loaded, with the model's longest request in
            tokens. It raises an error if that length does not fit other settings.

    Raises ConfigError: the model, the device or the memory does not fit the configuration.
    """
    device = devices.find_device(config.device)
    torch.set_num_threads(num_threads(config))
    if device.type == "cpu":
        keep_freed_memory()
    dtype = devices.find_dtype(config.dtype, device)
    kv_dtype = devices.find_kv_dtype(config.kv_cache_dtype, dtype)
    try:
        backend, _ = choose(config.attention, str(device), dtype, kv_dtype)
    except BackendUnavailableError as error:
        raise ConfigError("attention", str(error)) from None
    # Check these settings now, before minutes of loading.
    kv_memory_bytes(config.kv_memory, devices.free_bytes(device), cap_share=False)
    config.overlaps(launch_blocks=devices.launch_blocks(device))
    progress("finding the model", 0.0)
    folder = checkpoint.locate(config.model, progress)
    name = config.model if config.model == "demo" else _name(config.model, folder)
    model_config = loader.load_config(folder, name)
    max_model_len = longest_request(model_config, name, config.max_model_len)
    check_length(max_model_len)
    tokenizer = checkpoint.load_tokenizer(folder)
    with devices.memory_for(f"the weights of {name}", "take a smaller model, or free memory there"):
        model = loader.load_model(
            folder, name, model_config, config.model_impl, max_model_len, dtype, device, progress
        )
    on_gpu = device.type == "cuda"
    num_blocks = TRIAL_BLOCKS
    if not on_gpu:
        progress("allocating the KV cache", 0.0)
        num_blocks = num_kv_blocks(
            config,
            model.kv_shape.in_dtype(kv_dtype.itemsize),
            max_model_len,
            devices.free_bytes(device),
            cap_share=True,
        )
    runner = ModelRunner(
        model,
        tokenizer,
        backend,
        loader.eos_token_ids(model_config, folder, tokenizer),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        seed=config.seed,
        threads=_thread_choice(config, device, model),
        kv_dtype=kv_dtype,
    )
    if on_gpu:
        prepare(runner, config, progress)
        runner.measure()
    else:
        runner.warm_up(progress)
    return runner


def _thread_choice(config: EngineConfig, device: torch.device, model: Model) -> ThreadChoice | None:
    """Return what chooses the number of CPU threads for each step."""
    most = num_threads(config)
    if config.threads or most == 1 or device.type != "cpu" or not model.is_thread_invariant:
        return None
    return ThreadChoice(most)


def _name(model: str, folder: Path) -> str:
    if model.endswith(gguf_checkpoint.SUFFIX):
        return Path(model).stem
    return folder.resolve().name if Path(model).expanduser().is_dir() else model
