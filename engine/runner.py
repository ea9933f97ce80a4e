"""`ModelRunner`: a real model behind the `Runner` protocol. Owns every tensor of the engine."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from stepscope.engine import input_batch
from stepscope.engine.commands import SamplingParams
from stepscope.engine.config import ConfigError, EngineConfig
from stepscope.engine.environment import keep_freed_memory, num_threads
from stepscope.engine.memory import free_host_bytes, kv_memory_bytes, num_kv_blocks
from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.model import Model, StepContext
from stepscope.engine.models.support import longest_request
from stepscope.engine.request import Request
from stepscope.engine.sampler import Sampled, Sampler
from stepscope.engine.step import ScheduledRow, ScheduledStep, StepResult
from stepscope.engine.thread_choice import ThreadChoice
from stepscope.engine.tokenizer import Tokenizer
from stepscope.engine.wire import Phase
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
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.vocab_size = model.vocab_size
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._device = model.device
        self._sampler = Sampler(seed)
        self._threads = threads
        self._tables = input_batch.BlockTables()
        shape = (num_blocks, block_size, model.kv_shape.num_kv_heads, model.kv_shape.head_dim)
        self._key_caches, self._value_caches = (
            [_zeros(shape, model.kv_dtype, model.device) for _ in range(model.kv_shape.num_layers)]
            for _ in range(2)
        )

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress) -> "ModelRunner":
        """Find, read and warm up the model that `config` names.

        Args:
            progress: told what is being done and its share (0..1).

        Raises:
            ConfigError: anything that is wrong with the model, the device or the memory.
        """
        device = _device(config.device)
        torch.set_num_threads(num_threads(config))
        if device.type == "cpu":
            keep_freed_memory()
        dtype = _dtype(config.dtype, device)
        try:
            backend, _ = choose(config.attention, str(device), dtype)
        except BackendUnavailableError as error:
            raise ConfigError("attention", str(error)) from None
        # A wrong setting is refused now, not after minutes of loading.
        kv_memory_bytes(config.kv_memory, _free_bytes(device), cap_share=False)
        progress("finding the model", 0.0)
        folder = checkpoint.locate(config.model, progress)
        name = config.model if config.model == "demo" else _name(config.model, folder)
        model_config = loader.load_config(folder, name)
        max_model_len = longest_request(model_config, name, config.max_model_len)
        tokenizer = checkpoint.load_tokenizer(folder)
        model = loader.load_model(
            folder, name, model_config, config.model_impl, max_model_len, dtype, device, progress
        )
        progress("allocating the KV cache", 0.0)
        runner = cls(
            model,
            tokenizer,
            backend,
            loader.eos_token_ids(model_config, folder),
            num_blocks=num_kv_blocks(
                config,
                model.kv_shape,
                max_model_len,
                _free_bytes(device),
                cap_share=device.type == "cpu",
            ),
            block_size=config.block_size,
            max_model_len=max_model_len,
            seed=config.seed,
            threads=_thread_choice(config, device, model),
        )
        runner.warm_up(progress)
        return runner

    @property
    def description(self) -> ModelDescription:
        shape = self._model.kv_shape
        return ModelDescription(
            model=self._model.name,
            architecture=self._model.architecture,
            dtype=str(self._model.kv_dtype).removeprefix("torch."),
            device=str(self._device),
            implementation=self._model.implementation,
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
        """Run the model over `step.rows` and sample where a row asks for it."""
        batch = input_batch.build(step.rows, self._tables, self._block_size)
        timer = _DeviceTimer(self._device)
        with torch.inference_mode():
            context = StepContext(
                PagedBatch(
                    query_starts=batch.query_starts,
                    context_lens=batch.context_lens,
                    block_tables=batch.block_tables,
                    slot_mapping=self._tensor(batch.slot_mapping),
                    block_size=self._block_size,
                    device=self._device,
                    decodes=batch.decodes,
                ),
                self._key_caches,
                self._value_caches,
                self._backend,
            )
            input_ids, positions = self._tensor(batch.input_ids), self._tensor(batch.positions)
            logits_of = self._tensor(batch.logits_of)
            threads = self._use_threads(len(batch.input_ids))
            launch_ns = self.clock()
            timer.start()
            logits = self._model.forward(input_ids, positions, context, logits_of)
            timer.stop()
            sampled = Sampled([], {})
            if batch.sampling_rows:
                requests = [step.rows[i].request for i in batch.sampling_rows]
                sampled = self._sampler.sample(logits, requests)
            device_ns = timer.elapsed_ns()
        tokens_ns = self.clock()
        if self._threads is not None:
            self._threads.note(len(batch.input_ids), threads, tokens_ns - launch_ns)
        token_ids: list[int | None] = [None] * len(step.rows)
        for row, token_id in zip(batch.sampling_rows, sampled.token_ids, strict=True):
            token_ids[row] = token_id
        logprobs = {batch.sampling_rows[i]: found for i, found in sampled.logprobs.items()}
        return StepResult(token_ids, launch_ns, tokens_ns, device_ns, logprobs=logprobs)

    def warm_up(self, progress: Progress) -> None:
        """Run steps of several shapes, so that the first one of a request is like any other.

        What they leave in the KV cache belongs to no request.
        """
        for done, (num_tokens, num_requests) in enumerate(WARM_UP_STEPS):
            progress("warming up", done / len(WARM_UP_STEPS))
            num_tokens = min(num_tokens, self.max_model_len)
            num_blocks = -(-num_tokens // self._block_size)
            rows = []
            for i in range(num_requests):
                request = Request(
                    request_id=-1 - i,
                    prompt_token_ids=[0] * num_tokens,
                    sampling=SamplingParams(),
                    arrival_ns=0,
                )
                request.block_table = [
                    (i * num_blocks + j) % self.num_blocks for j in range(num_blocks)
                ]
                rows.append(ScheduledRow(request, Phase.PREFILL, 0, num_tokens, True))
            self.execute(ScheduledStep(-1, rows))
        progress("ready", 1.0)

    def _use_threads(self, num_tokens: int) -> int:
        if self._threads is None:
            return 0
        threads = self._threads.choose(num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return threads

    def _tensor(self, array: input_batch.IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


class _DeviceTimer:
    """Time that an accelerator spends on a step; knows nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )

    def start(self) -> None:
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()

    def elapsed_ns(self) -> int | None:
        """Waits for the device, also when no token was asked for."""
        if self._events is None:
            return None
        self._events[1].synchronize()
        return round(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _thread_choice(config: EngineConfig, device: torch.device, model: Model) -> ThreadChoice | None:
    """None: every step has the threads that were asked for, or the work is another device's."""
    most = num_threads(config)
    if config.threads or most == 1 or device.type != "cpu" or not model.is_thread_invariant:
        return None
    return ThreadChoice(most)


def _device(setting: str) -> torch.device:
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"device is auto, cpu, cuda or cuda:N, not {setting!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                "device",
                f"device {setting!r} is not there: torch {torch.__version__} sees {count} GPUs; "
                "use --device cpu, or a torch built for your GPU",
            )
    return device


def _dtype(setting: str, device: torch.device) -> torch.dtype:
    if setting == "auto":
        # On a CPU with bf16 instructions the demo model takes 0.65 to 0.85 of the time of fp32 (a
        # chunk of 256 with 8 decodes 65 against 95 ms); without them bf16 is emulated, and slow.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return torch.bfloat16 if device.type == "cuda" or has_bf16() else torch.float32
    dtype = getattr(torch, setting)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cache without NaN: a padded gather multiplies what it finds by 0, and 0 * NaN is NaN.

    On a CPU its pages are those of calloc, zero without being written: a cache of 1 GiB is there at
    once (writing it takes seconds) and occupies what is used of it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def _name(model: str, folder: Path) -> str:
    """What a model is called: as it was asked for, or by its folder."""
    return folder.resolve().name if Path(model).expanduser().is_dir() else model
