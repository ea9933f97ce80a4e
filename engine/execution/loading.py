"""Builds a runner from a configuration: finds the device, loads the model, allocates memory.

On a GPU, it prepares the runner before its first step: KV pool, kernels and CUDA graphs. First, a
trial measures the memory of the weights, the largest step and the graphs. The KV pool gets
what then remains of `gpu_memory_utilization`.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import structs

from stepscope.engine.execution import devices
from stepscope.engine.execution.devices import memory_for
from stepscope.engine.execution.environment import (
    ThreadChoice,
    keep_freed_memory,
    num_threads,
)
from stepscope.engine.execution.graphs import (
    GRAPH_BYTES,
    CudaDevice,
    StepGraphs,
    graph_sizes,
    piece_sizes,
)
from stepscope.engine.execution.input_batch import DecodeBuffers, TokenBuffers
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.step_costs import measure, trial_step
from stepscope.engine.models import checkpoint, gguf_checkpoint, loader
from stepscope.engine.models.checkpoint import Progress
from stepscope.engine.models.model_config import longest_request
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import (
    DeviceUse,
    device_kv_blocks,
    kv_memory_bytes,
    num_kv_blocks,
)
from stepscope.kernels.dispatch.backends import BackendUnavailableError, choose
from stepscope.kernels.paged_attention import FP8
from stepscope.kernels.triton.plan import warm_up_steps

log = logging.getLogger("stepscope.engine")


# Memory is reserved for a step of this size, unless `token_capacity` says otherwise. If an operator
# allows larger steps later, one that does not fit is scheduled again in smaller ones.
TRIAL_TOKENS = 8192
# KV blocks for the trial. Its requests may share them, because nothing reads the content later.
TRIAL_BLOCKS = 64


def prepare(
    runner: ModelRunner, config: EngineConfig, progress: Progress, gpu: CudaDevice | None = None
) -> None:
    """Make `runner` ready to serve. So far, its KV pool must have `TRIAL_BLOCKS` blocks.

    `gpu`: None for the runner's own device. Tests pass another.

    Raises ConfigError: there is too little memory. The message says what to lower.
    """
    gpu = CudaDevice(runner.device) if gpu is None else gpu
    sizes = graph_sizes(config.seq_capacity) if runner.is_capturable else []
    num_tokens = piece_sizes(config.token_capacity or TRIAL_TOKENS) if sizes else []
    lower = (
        "lower --token-capacity or --seq-capacity, or take a smaller model; "
        "nvidia-smi shows who else uses the GPU"
    )
    with torch.inference_mode():
        progress("a trial of the largest step", 0.0)
        with memory_for("the largest step", lower):
            use = _trial(runner, config, sizes, num_tokens, gpu)
        num_blocks = device_kv_blocks(config, runner.kv_shape, runner.max_model_len, use)
        progress("allocating the KV cache", 0.0)
        with memory_for("the KV cache", "lower --gpu-memory-utilization or --kv-memory"):
            runner.allocate(num_blocks)
        steps = warm_up_steps(runner.max_model_len)
        for done, pair in enumerate(steps):
            progress("compiling kernels", done / len(steps))
            runner.execute(trial_step([pair], runner.num_blocks, runner.block_size))
        if sizes:
            with memory_for("CUDA graphs", "lower --gpu-memory-utilization or --seq-capacity"):
                where = runner.block_size, runner.scratch_slot, runner.device
                logits = torch.empty(
                    sizes[-1], runner.vocab_size, dtype=runner.dtype, device=runner.device
                )
                buffers = DecodeBuffers(sizes[-1], runner.max_model_len, *where)
                graphs = StepGraphs(sizes, runner.forward, None, buffers, logits, gpu)
                tokens = TokenBuffers(num_tokens[-1], *where)
                pieces = StepGraphs(num_tokens, runner.forward, runner.backend, tokens, logits, gpu)
                pieces.record(lambda what, share: progress(what, share / 2))
                graphs.record(lambda what, share: progress(what, (1 + share) / 2))
                runner.graphs, runner.pieces = graphs, pieces
    progress("ready", 1.0)


def _trial(
    runner: ModelRunner,
    config: EngineConfig,
    sizes: list[int],
    num_tokens: list[int],
    gpu: CudaDevice,
) -> DeviceUse:
    """Run the largest step. Returns the memory of the weights, of this step and of the graphs.

    The graphs are of decodes of so many requests (`sizes`), and of steps of so many tokens.
    """
    wanted = config.token_capacity or TRIAL_TOKENS
    num_requests = min(config.seq_capacity, wanted)
    each = max(1, min(wanted // num_requests, runner.max_model_len))

    def peak_bytes(lengths: list[tuple[int, int]]) -> int:
        step = trial_step(lengths, runner.num_blocks, runner.block_size)
        runner.launch_now(step).collect()  # once before, because the first run allocates more
        return gpu.peak_bytes(lambda: runner.launch_now(step).collect())

    activations = peak_bytes([(0, each)] * num_requests)
    graphs = 0
    if sizes:
        before = min(each, runner.max_model_len - 1)
        chunk = min(num_tokens[-1], runner.max_model_len)
        most = max(
            peak_bytes([(before, 1)] * sizes[-1]),
            peak_bytes([(0, chunk)] * -(-num_tokens[-1] // chunk)),
        )
        graphs = most + (len(sizes) + len(num_tokens)) * GRAPH_BYTES
    total, others, allocated = gpu.memory()
    use = DeviceUse(total, others, allocated - runner.kv_bytes, activations, graphs)
    log.info("of the GPU's memory: %s", use.in_words())
    return use


@memory_for("the first steps", "lower --gpu-memory-utilization, or take a smaller model")
def load_runner(
    config: EngineConfig,
    progress: Progress,
    check_length: Callable[[int], None] = lambda max_model_len: None,
) -> ModelRunner:
    """Find, load and warm up the model that `config` names, and return its runner.

    `check_length`: called before the weights are loaded, with the model's longest request in
    tokens. It raises an error if that length does not fit other settings.

    Raises ConfigError: the model, the device or the memory does not fit the configuration.
    """
    device = devices.find_device(config.device)
    torch.set_num_threads(num_threads(config))
    if device.type == "cpu":
        keep_freed_memory()
    dtype = devices.find_dtype(config.dtype, device)
    kv_dtype = {"auto": dtype, "bf16": torch.bfloat16, "fp8_e4m3": FP8}[config.kv_cache_dtype]
    try:
        backend, reason = choose(config.attention, str(device), dtype, kv_dtype)
    except BackendUnavailableError as error:
        raise ConfigError("attention", str(error)) from None
    if device.type == "cuda" and config.attention == "auto" and not backend.is_capturable:
        log.warning("no fast attention and no CUDA graphs on this GPU: %s", reason)
    # Check these settings now, before minutes of loading.
    kv_memory_bytes(config.kv_memory, devices.free_bytes(device))
    config.overlaps(launch_blocks=device.type == "cpu")
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
            structs.replace(model.kv_shape, dtype_bytes=kv_dtype.itemsize),
            max_model_len,
            devices.free_bytes(device),
        )
    most = num_threads(config)
    may_choose = not on_gpu and not config.threads and most > 1 and model.is_thread_invariant
    runner = ModelRunner(
        model,
        tokenizer,
        backend,
        loader.eos_token_ids(model_config, folder, tokenizer),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        seed=config.seed,
        threads=ThreadChoice(most) if may_choose else None,
        kv_dtype=kv_dtype,
    )
    if on_gpu:
        prepare(runner, config, progress)
    else:
        progress("warming up", 0.0)
    runner.step_costs = measure(runner)
    progress("ready", 1.0)
    return runner


def _name(model: str, folder: Path) -> str:
    if model.endswith(gguf_checkpoint.SUFFIX):
        return Path(model).stem
    return folder.resolve().name if Path(model).expanduser().is_dir() else model
