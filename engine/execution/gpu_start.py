"""Prepares a runner on a GPU before its first step: KV pool, kernels and CUDA graphs.

First, a trial measures the memory of the weights, the largest step and the graphs. The KV pool gets
what then remains of `gpu_memory_utilization`.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from stepscope.engine.execution.graphs import (
    GRAPH_BYTES,
    CudaGraphDevice,
    DecodeGraphs,
    GraphDevice,
    StepBuffers,
    graph_sizes,
)
from stepscope.engine.execution.machine.devices import give_back_memory, memory_for
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.scheduling.kv_memory import DeviceUse, device_kv_blocks
from stepscope.kernels.triton.plan import warm_up_steps

if TYPE_CHECKING:
    from stepscope.engine.execution.runner import ModelRunner

log = logging.getLogger("stepscope.engine")

Progress = Callable[[str, float], None]

# Memory is reserved for a step of this size, unless `token_capacity` says otherwise. If an operator
# allows larger steps later, a step that does not fit runs in halves.
TRIAL_TOKENS = 8192
# KV blocks for the trial. Its requests may share them, because nothing reads the content later.
TRIAL_BLOCKS = 64


class MemoryNow(NamedTuple):
    """A device's memory at one moment, in bytes."""

    total: int
    free: int  # not used by any process
    reserved: int  # held by torch, for tensors or for later
    allocated: int  # held by tensors


class Gpu(Protocol):
    """What this module needs from a GPU: its memory, the peak of a run, a recorder of graphs."""

    def memory(self) -> MemoryNow: ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the peak memory during `run` in bytes, beyond what was allocated before `run`."""
        ...

    def recorder(self) -> GraphDevice: ...


class CudaGpu:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self) -> MemoryNow:
        give_back_memory(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryNow(
            total,
            free,
            torch.cuda.memory_reserved(self._device),
            torch.cuda.memory_allocated(self._device),
        )

    def peak_bytes(self, run: Callable[[], object]) -> int:
        before = self.memory().allocated
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device)) - before

    def recorder(self) -> GraphDevice:
        return CudaGraphDevice(self._device)


def prepare(
    runner: "ModelRunner", config: EngineConfig, progress: Progress, gpu: Gpu | None = None
) -> None:
    """Make `runner` ready to serve. So far, its KV pool must have `TRIAL_BLOCKS` blocks.

    Args:
        gpu: None for the runner's own device. Tests pass another.

    Raises ConfigError: there is too little memory. The message says what to lower.
    """
    gpu = CudaGpu(runner.device) if gpu is None else gpu
    sizes = graph_sizes(config.seq_capacity) if runner.is_capturable else []
    lower = (
        "lower --token-capacity or --seq-capacity, or take a smaller model; "
        "nvidia-smi shows who else uses the GPU"
    )
    with torch.inference_mode():
        progress("a trial of the largest step", 0.0)
        with memory_for("the largest step", lower):
            use = _trial(runner, config, sizes, gpu)
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
                runner.graphs = _record(runner, sizes, progress, gpu.recorder())
    progress("ready", 1.0)


def _trial(runner: "ModelRunner", config: EngineConfig, sizes: list[int], gpu: Gpu) -> DeviceUse:
    """Run the largest step. Returns the memory of the weights, of this step and of the graphs."""
    wanted = config.token_capacity or TRIAL_TOKENS
    num_requests = min(config.seq_capacity, wanted)
    each = max(1, min(wanted // num_requests, runner.max_model_len))

    def peak_bytes(lengths: list[tuple[int, int]]) -> int:
        step = trial_step(lengths, runner.num_blocks, runner.block_size)
        # Not in halves: a step in halves needs less memory than the whole step.
        runner.launch_whole(step).collect()  # once before, because the first run allocates more
        return gpu.peak_bytes(lambda: runner.launch_whole(step).collect())

    activations = peak_bytes([(0, each)] * num_requests)
    graphs = 0
    if sizes:
        before = min(each, runner.max_model_len - 1)
        graphs = peak_bytes([(before, 1)] * sizes[-1]) + len(sizes) * GRAPH_BYTES
    now = gpu.memory()
    use = DeviceUse(
        total=now.total,
        others=now.total - now.free - now.reserved,
        weights=now.allocated - runner.kv_bytes,
        activations=activations,
        graphs=graphs,
    )
    log.info("of the GPU's memory: %s", use.in_words())
    return use


def _record(
    runner: "ModelRunner", sizes: list[int], progress: Progress, recorder: GraphDevice
) -> DecodeGraphs:
    most, device = sizes[-1], runner.device
    buffers = StepBuffers(
        most, runner.max_model_len, runner.block_size, runner.scratch_slot, device
    )
    logits = torch.empty(most, runner.vocab_size, dtype=runner.dtype, device=device)
    graphs = DecodeGraphs(sizes, runner.forward, buffers, logits, recorder)
    graphs.record(progress)
    return graphs
