"""`ModelRunner`: runs the steps of a real model (a `Runner`); `LaunchedStep`: one that runs.

It owns every tensor of the engine.
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from stepscope.engine.execution import devices, input_batch
from stepscope.engine.execution.environment import ThreadChoice
from stepscope.engine.execution.graphs import StepGraphs
from stepscope.engine.execution.host_sampling import UNSOUND, Sampled
from stepscope.engine.execution.input_batch import StepInputs
from stepscope.engine.execution.kv_frames import KVFrames
from stepscope.engine.execution.sampler import Sampler, SamplesInFlight
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.models.loader import Model
from stepscope.engine.protocol.wire import StepCosts
from stepscope.engine.scheduling.acceptance import bursts_of
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import (
    DeviceMemoryError,
    InFlight,
    ScheduledRow,
    ScheduledStep,
    StepResult,
)
from stepscope.engine.text.tokenizer import Tokenizer
from stepscope.kernels.paged_attention import (
    FP8,
    AttentionBackend,
    KVScales,
    LayerCache,
    PagedBatch,
    StepContext,
    scales_of,
    to_device,
)

SCALE_TOKENS = 256  # of the prompt from which the FP8 scales are computed


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched and may still be running."""

    rows: Sequence[ScheduledRow]
    batch: input_batch.InputBatch
    samples: SamplesInFlight | None
    timer: devices.DeviceTimer
    launch_ns: int
    clock: Callable[[], int]
    num_tokens: int  # with padding
    cuda_graph: str | None

    def tokens_of(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Return the requests' new tokens as a device tensor, without waiting for the step."""
        assert self.samples is not None, "only a step that samples has a token to come"
        rows, tokens = self.rows, self.samples.tokens
        places = {rows[row].request.request_id: i for i, row in enumerate(self.batch.sampling_rows)}
        wanted = np.array([places[request_id] for request_id in request_ids], dtype=np.int64)
        return tokens.index_select(0, to_device(wanted, tokens.device))

    def collect(self) -> StepResult:
        sampled = Sampled([], {}) if self.samples is None else self.samples.collect()
        device_ns = self.timer.elapsed_ns()
        tokens_ns = self.clock()
        sampling_rows = self.batch.sampling_rows
        sampled_of: dict[int, list[int]] = {}
        for row, token_id in zip(sampling_rows, sampled.token_ids, strict=True):
            sampled_of.setdefault(row, []).append(token_id)
        bursts = bursts_of(self.rows, sampled_of) if self.batch.depths else None
        # Of a burst that is unsound, the last token is, too: it equals no draft.
        newest = {row: tokens[-1] for row, tokens in (sampled_of | (bursts or {})).items()}
        token_ids = [newest.get(row) for row in range(len(self.rows))]
        return StepResult(
            token_ids,
            self.launch_ns,
            tokens_ns,
            device_ns,
            num_padded_tokens=self.num_tokens - len(self.batch.input_ids),
            logprobs={sampling_rows[i]: found for i, found in sampled.logprobs.items()},
            bursts=bursts,
            cuda_graph=self.cuda_graph,
            unsound_rows=tuple(i for i, each in enumerate(token_ids) if each == UNSOUND),
        )


class ModelRunner:
    """Executes steps on one device.

    The KV cache has one tensor of keys and one of values per layer, each
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
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.vocab_size = model.vocab_size
        self.block_size = block_size
        self.device = model.device
        self.launch_blocks = model.device.type == "cpu"  # launching returns when it is done
        self.dtype = model.dtype  # of logits
        self.kv_shape = model.kv_shape
        self.graphs: StepGraphs | None = None  # of decodes
        self.pieces: StepGraphs | None = None  # of other steps
        self.step_costs: StepCosts | None = None
        self._model = model
        self.backend = backend
        self._sampler = Sampler(seed)
        self._threads = threads
        self._caches: list[LayerCache] = []
        self._kv_dtype = model.dtype
        self._kv_scales: list[KVScales | None] = [None] * self.kv_shape.num_layers
        if kv_dtype is FP8:
            self._kv_scales = self._find_kv_scales()
        if kv_dtype is not None:
            self._kv_dtype = kv_dtype
            self.kv_shape = structs.replace(self.kv_shape, dtype_bytes=kv_dtype.itemsize)
        self.allocate(num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of `num_blocks` blocks.

        If steps can be recorded as graphs, there is one more block, for padding rows
        (`scratch_slot`).
        """
        self.graphs = self.pieces = None
        self._tables = input_batch.BlockTables()  # the former may name blocks that this pool lacks
        self._caches = []
        devices.give_back_memory(self.device)
        shape = self.kv_shape
        num_allocated = num_blocks + self.is_capturable
        size = num_allocated, self.block_size, shape.num_kv_heads, shape.head_dim
        zeros = partial(devices.zeros, size, self._kv_dtype, self.device)
        self._caches = [LayerCache(zeros(), zeros(), each) for each in self._kv_scales]
        self.num_blocks = num_blocks

    @property
    def scratch_slot(self) -> int:
        """A KV slot outside all blocks, for padding rows. Exists only if `is_capturable`."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches)

    def kv_frames(self, model: str) -> KVFrames:
        """Return the KV blocks as frames, which engines exchange when they hand over requests."""
        scales = [
            scale.tolist()
            for scales in self._kv_scales
            if scales is not None
            for scale in (scales.key, scales.value)
        ]
        facts = (model, self._model.num_parameters, self.kv_shape, self.block_size, scales)
        dtypes = f"{self.dtype} {self._kv_dtype}"
        layout = hashlib.sha256(f"{facts} {dtypes}".encode()).hexdigest()[:32]
        keys, values = ([cache[place] for cache in self._caches] for place in range(2))
        return KVFrames([*keys, *values], layout)

    def seed_of(self, request: Request) -> int:
        return self._sampler.seed_of(request)

    @property
    def is_capturable(self) -> bool:
        """Whether decodes can be recorded as CUDA graphs."""
        return self._model.is_capturable and self.backend.is_capturable

    @property
    def description(self) -> dict[str, Any]:
        model, shape = self._model, self._model.kv_shape
        graphs = ""
        if self.graphs is not None and self.pieces is not None:
            graphs = (
                f", CUDA graphs up to {self.graphs.sizes[-1]} requests, "
                f"in pieces up to {self.pieces.sizes[-1]} tokens"
            )
        return {
            "model": model.name,
            "architecture": model.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(self._kv_dtype).removeprefix("torch."),
            "device": str(self.device),
            "implementation": model.implementation + graphs,
            "attention_backend": self.backend.name,
            "num_layers": shape.num_layers,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "num_parameters": model.num_parameters,
            "weight_bytes": model.weight_bytes,
            "flops_per_token": model.flops_per_token,
            "max_graph_tokens": None if self.pieces is None else self.pieces.sizes[-1],
        }

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).collect()

    def launch(self, step: ScheduledStep) -> InFlight:
        try:
            return self.launch_now(step)
        except torch.OutOfMemoryError:
            pass  # not handled here, where the error's traceback keeps the step's tensors alive
        except Exception:
            devices.check(self.device)
            raise
        devices.give_back_memory(self.device)
        raise DeviceMemoryError

    def forward(self, inputs: StepInputs, backend: AttentionBackend | None = None) -> torch.Tensor:
        """Launch the model, without waiting. Returns logits [len(inputs.logits_of), vocab_size].

        `backend`: None for that of the runner.
        """
        backend = self.backend if backend is None else backend
        context = StepContext(inputs.batch, self._caches, backend)
        return self._model.forward(inputs.input_ids, inputs.positions, context, inputs.logits_of)

    def launch_now(self, step: ScheduledStep) -> LaunchedStep:
        """Start a step as `launch` does. May raise torch.OutOfMemoryError."""
        after = step.after
        batch = input_batch.build(step.rows, self._tables, self.block_size, ahead=after is not None)
        num_tokens = len(batch.input_ids)
        timer = devices.DeviceTimer(self.device)
        with torch.inference_mode():
            fed = None
            if batch.fed_by:
                assert isinstance(after, LaunchedStep)
                fed = after.tokens_of(batch.fed_by)
            size, cuda_graph, compute = self._prepared(batch, fed)
            threads = self._use_threads(num_tokens)
            launch_ns = self.clock()
            timer.start()  # not before: an idle device would wait for the inputs in this time
            logits = compute()
            if len(batch.logits_of) < len(logits):  # a graph computes all
                logits = logits[self._tensor(batch.logits_of)]
            samples = None
            if batch.sampling_rows:
                requests = [step.rows[i].request for i in batch.sampling_rows]
                samples = self._sampler.launch(logits, requests, batch.depths)
            timer.stop()
        if self._threads is not None:  # only on a CPU, where the step has ended now
            self._threads.note(num_tokens, threads, self.clock() - launch_ns)
        return LaunchedStep(
            step.rows, batch, samples, timer, launch_ns, self.clock, size, cuda_graph
        )

    def _prepared(
        self, batch: input_batch.InputBatch, fed: torch.Tensor | None
    ) -> tuple[int, str | None, Callable[[], torch.Tensor]]:
        """Copy the inputs of a step to the device.

        Returns the number of tokens with padding; how the step uses CUDA graphs: "full",
        "piecewise", "none", or None on a CPU without graphs; and what launches the model.
        """
        num_tokens = len(batch.input_ids)
        graphs, pieces = self.graphs, self.pieces
        if graphs is not None and (size := graphs.size_for(batch)) is not None:
            graphs.buffers.fill(batch, size, fed)
            return size, "full", partial(graphs.run, size, num_tokens)
        if pieces is not None and (size := pieces.size_for(batch)) is not None:
            pieces.buffers.fill(batch, size, fed)
            run = partial(pieces.run, size, len(batch.logits_of), self._paged(batch))
            return size, "piecewise", run
        has_graphs = graphs is not None or self.device.type == "cuda"
        input_ids = self._tensor(batch.input_ids)
        if fed is not None:
            input_ids.index_copy_(0, self._tensor(np.array(batch.fed_at)), fed)
        positions, logits_of = self._tensor(batch.positions), self._tensor(batch.logits_of)
        inputs = StepInputs(input_ids, positions, logits_of, self._paged(batch))
        return num_tokens, "none" if has_graphs else None, partial(self.forward, inputs)

    def _paged(self, batch: input_batch.InputBatch) -> PagedBatch:
        return PagedBatch(
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            slot_mapping=self._tensor(batch.slot_mapping),
            block_size=self.block_size,
            device=self.device,
            decodes=batch.decodes,
        )

    def _find_kv_scales(self) -> list[KVScales | None]:
        num_tokens = min(SCALE_TOKENS, self.max_model_len)
        self.allocate(-(-num_tokens // self.block_size))
        tokens = random.Random(0).choices(range(self.vocab_size), k=num_tokens)
        self.execute(trial_step([(0, num_tokens)], self.num_blocks, self.block_size, tokens))
        return [scales_of(cache) for cache in self._caches]

    def _use_threads(self, num_tokens: int) -> int:
        if self._threads is None:
            return 0
        threads = self._threads.choose(num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return threads

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self.device)
