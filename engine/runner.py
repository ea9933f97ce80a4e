"""`ModelRunner`: a real model behind the `Runner` protocol. Owns every tensor of the engine."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from stepscope.engine.config import ConfigError, EngineConfig
from stepscope.engine.environment import keep_freed_memory, num_threads
from stepscope.engine.execution import input_batch
from stepscope.engine.execution.devices import (
    DeviceTimer,
    find_device,
    find_dtype,
    free_bytes,
    give_back_memory,
    is_out_of_memory,
    memory_for,
    zeros,
)
from stepscope.engine.execution.gpu_start import TRIAL_BLOCKS, prepare
from stepscope.engine.execution.graphs import DecodeGraphs
from stepscope.engine.execution.memory import kv_memory_bytes, num_kv_blocks
from stepscope.engine.execution.smaller_steps import run_in_halves
from stepscope.engine.execution.step_buffers import StepInputs
from stepscope.engine.execution.thread_choice import ThreadChoice
from stepscope.engine.execution.trial_steps import trial_step
from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.model import Model, StepContext
from stepscope.engine.models.support import longest_request
from stepscope.engine.sampler import Sampled, Sampler
from stepscope.engine.step import ScheduledStep, StepResult
from stepscope.engine.tokenizer import Tokenizer
from stepscope.kernels.paged_attention import (
    AttentionBackend,
    BackendUnavailableError,
    PagedBatch,
    choose,
)

Progress = Callable[[str, float], None]

# (prompt tokens, requests) of the steps that are run once at load.
WARM_UP_STEPS = ((64, 1), (1, 1), (1, 8), (200, 2))


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator is told of the model; the fields are `EngineInfo`'s."""

    model: str
    architecture: str
    dtype: str
    device: str
    implementation: str
    attention_backend: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    weight_bytes: int
    flops_per_token: int


class ModelRunner:
    """Executes steps on one device.

    The KV cache is one tensor of keys and one of values a layer, each
    `[num_blocks, block_size, num_kv_heads, head_dim]`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        backend: AttentionBackend,
        eos_token_ids: frozenset[int],
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        seed: int,
        threads: ThreadChoice | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.vocab_size = model.vocab_size
        self.block_size = block_size
        self.device = model.device
        self.dtype = model.kv_dtype
        self.kv_shape = model.kv_shape
        self.graphs: DecodeGraphs | None = None
        self._model = model
        self._backend = backend
        self._sampler = Sampler(seed)
        self._threads = threads
        self._tables = input_batch.BlockTables()
        self._key_caches: list[torch.Tensor] = []
        self._value_caches: list[torch.Tensor] = []
        self.allocate(num_blocks)

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress) -> "ModelRunner":
        """Find, read and warm up the model that `config` names.

        Args:
            progress: told what is being done and its share (0..1).

        Raises:
            ConfigError: anything that is wrong with the model, the device or the memory.
        """
        device = find_device(config.device)
        torch.set_num_threads(num_threads(config))
        if device.type == "cpu":
            keep_freed_memory()
        dtype = find_dtype(config.dtype, device)
        try:
            backend, _ = choose(config.attention, str(device), dtype)
        except BackendUnavailableError as error:
            raise ConfigError("attention", str(error)) from None
        # A wrong setting is refused now, not after minutes of loading.
        kv_memory_bytes(config.kv_memory, free_bytes(device), cap_share=False)
        progress("finding the model", 0.0)
        folder = checkpoint.locate(config.model, progress)
        name = config.model if config.model == "demo" else _name(config.model, folder)
        model_config = loader.load_config(folder, name)
        max_model_len = longest_request(model_config, name, config.max_model_len)
        tokenizer = checkpoint.load_tokenizer(folder)
        with memory_for(f"the weights of {name}", "take a smaller model, or free memory there"):
            model = loader.load_model(
                folder,
                name,
                model_config,
                config.model_impl,
                max_model_len,
                dtype,
                device,
                progress,
            )
        on_gpu = device.type == "cuda"
        num_blocks = TRIAL_BLOCKS
        if not on_gpu:
            progress("allocating the KV cache", 0.0)
            num_blocks = num_kv_blocks(
                config, model.kv_shape, max_model_len, free_bytes(device), cap_share=True
            )
        runner = cls(
            model,
            tokenizer,
            backend,
            loader.eos_token_ids(model_config, folder),
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            seed=config.seed,
            threads=_thread_choice(config, device, model),
        )
        if on_gpu:
            prepare(runner, config, progress)
        else:
            runner.warm_up(progress)
        return runner

    def allocate(self, num_blocks: int) -> None:
        """Give the KV cache `num_blocks` blocks; what it held is gone, and so are graphs.

        With graphs there is one more, for what fills steps up to their sizes: `scratch_slot`.
        """
        self.graphs = None
        self._key_caches, self._value_caches = [], []
        give_back_memory(self.device)
        shape = self.kv_shape
        size = (
            num_blocks + self.is_capturable,
            self.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self._key_caches, self._value_caches = (
            [zeros(size, self.dtype, self.device) for _ in range(shape.num_layers)]
            for _ in range(2)
        )
        self.num_blocks = num_blocks

    @property
    def scratch_slot(self) -> int:
        """A slot of the KV cache that no block has; there where steps can be captured."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache."""
        return sum(cache.nbytes for cache in (*self._key_caches, *self._value_caches))

    @property
    def is_capturable(self) -> bool:
        """Whether decodes can be recorded as graphs."""
        return self._model.is_capturable and self._backend.is_capturable

    @property
    def description(self) -> ModelDescription:
        shape = self._model.kv_shape
        return ModelDescription(
            model=self._model.name,
            architecture=self._model.architecture,
            dtype=str(self._model.kv_dtype).removeprefix("torch."),
            device=str(self.device),
            implementation=self._model.implementation
            + ("" if self.graphs is None else f", CUDA graphs up to {self.graphs.sizes[-1]}"),
            attention_backend=self._backend.name,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_parameters=self._model.num_parameters,
            weight_bytes=self._model.weight_bytes,
            flops_per_token=self._model.flops_per_token,
        )

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run the model over `step.rows` and sample where a row asks for it.

        A step that a GPU has no memory for is run in halves.
        """
        if self.device.type == "cpu":
            return self._execute(step)
        return run_in_halves(
            self._execute, step, is_out_of_memory, lambda: give_back_memory(self.device)
        )

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[len(inputs.logits_of), vocab_size]`; launches, and waits for nothing."""
        context = StepContext(inputs.batch, self._key_caches, self._value_caches, self._backend)
        return self._model.forward(inputs.input_ids, inputs.positions, context, inputs.logits_of)

    def _execute(self, step: ScheduledStep) -> StepResult:
        batch = input_batch.build(step.rows, self._tables, self.block_size)
        num_tokens = len(batch.input_ids)
        timer = DeviceTimer(self.device)
        with torch.inference_mode():
            size = None if self.graphs is None else self.graphs.size_for(batch)
            inputs = self._inputs(batch) if size is None else None
            threads = self._use_threads(num_tokens)
            launch_ns = self.clock()
            timer.start()
            if inputs is not None:
                logits = self.forward(inputs)
            else:
                assert self.graphs is not None
                assert size is not None
                logits = self.graphs.run(batch, size)
                if len(batch.logits_of) < num_tokens:
                    logits = logits[self._tensor(batch.logits_of)]
            timer.stop()
            sampled = Sampled([], {})
            if batch.sampling_rows:
                requests = [step.rows[i].request for i in batch.sampling_rows]
                sampled = self._sampler.sample(logits, requests)
            device_ns = timer.elapsed_ns()
        tokens_ns = self.clock()
        if self._threads is not None:
            self._threads.note(num_tokens, threads, tokens_ns - launch_ns)
        token_ids: list[int | None] = [None] * len(step.rows)
        for row, token_id in zip(batch.sampling_rows, sampled.token_ids, strict=True):
            token_ids[row] = token_id
        logprobs = {batch.sampling_rows[i]: found for i, found in sampled.logprobs.items()}
        return StepResult(
            token_ids,
            launch_ns,
            tokens_ns,
            device_ns,
            num_padded_tokens=0 if size is None else size - num_tokens,
            logprobs=logprobs,
        )

    def _inputs(self, batch: input_batch.InputBatch) -> StepInputs:
        return StepInputs(
            self._tensor(batch.input_ids),
            self._tensor(batch.positions),
            self._tensor(batch.logits_of),
            PagedBatch(
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                slot_mapping=self._tensor(batch.slot_mapping),
                block_size=self.block_size,
                device=self.device,
                decodes=batch.decodes,
            ),
        )

    def warm_up(self, progress: Progress) -> None:
        """Run steps of several shapes, so that the first one of a request is like any other.

        What they leave in the KV cache belongs to no request.
        """
        for done, (num_tokens, num_requests) in enumerate(WARM_UP_STEPS):
            progress("warming up", done / len(WARM_UP_STEPS))
            num_tokens = min(num_tokens, self.max_model_len)
            self.execute(
                trial_step([(0, num_tokens)] * num_requests, self.num_blocks, self.block_size)
            )
        progress("ready", 1.0)

    def _use_threads(self, num_tokens: int) -> int:
        if self._threads is None:
            return 0
        threads = self._threads.choose(num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return threads

    def _tensor(self, array: input_batch.IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _thread_choice(config: EngineConfig, device: torch.device, model: Model) -> ThreadChoice | None:
    """None: every step has the threads that were asked for, or the work is another device's."""
    most = num_threads(config)
    if config.threads or most == 1 or device.type != "cpu" or not model.is_thread_invariant:
        return None
    return ThreadChoice(most)


def _name(model: str, folder: Path) -> str:
    """What a model is called: as it was asked for, or by its folder."""
    return folder.resolve().name if Path(model).expanduser().is_dir() else model
