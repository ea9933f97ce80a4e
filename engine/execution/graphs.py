"""Steps as CUDA graphs: a step's kernels are recorded once and replayed as one launch, or a few.

A small step runs some hundreds of kernels of a few microseconds each. Launching them one by one
takes longer than running them. A graph has fixed shapes and addresses. So there is a graph for each
of a few sizes, and a step is padded to the next. Inputs that change from step to step lie in
`TokenBuffers`.

Decodes are one graph. In a step with prompt chunks, attention depends on the contexts of the step,
so it is planned and launched as in any step; everything between two attentions depends only on the
number of tokens, and is a graph.

`CudaDevice` records graphs, and measures what a device has left for the KV cache.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from stepscope.engine.execution.devices import give_back_memory
from stepscope.engine.execution.input_batch import InputBatch, StepInputs, TokenBuffers
from stepscope.engine.models.checkpoint import Progress
from stepscope.kernels.paged_attention import (
    AttentionBackend,
    AttentionOptions,
    LayerCache,
    PagedBatch,
)

# Larger steps run long enough to hide the launches of their kernels.
LARGEST_GRAPH = 512
# Memory of a graph of some hundred kernels beside its tensors (an estimate, to be measured).
GRAPH_BYTES = 8 << 20


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes to record for up to `most` requests: 1, 2, 4, 8, every 16, and `most`.

    None is larger than `LARGEST_GRAPH`. Above 8, at most 15 rows are padding. At 256 requests, that
    is 6 %. And a decode is bound by reading the weights, which all rows share.
    """
    most = min(most, LARGEST_GRAPH)
    sizes = [size for size in (1, 2, 4, 8, *range(16, most + 1, 16)) if size <= most]
    return sizes if sizes[-1] == most else [*sizes, most]


# With more tokens, kernels run long enough to hide the launches of the next.
LARGEST_STEP = 2048


def piece_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to record for steps of up to `most` tokens.

    Every 64 up to 512, then every 128. None is larger than `LARGEST_STEP`.
    """
    most = min(most, LARGEST_STEP)
    return [*(size for size in (*range(64, 512, 64), *range(512, most, 128)) if size < most), most]


Graph: TypeAlias = torch.cuda.CUDAGraph
Cut: TypeAlias = Callable[[], None]


# A call of the backend between two graphs. The queries lie in the buffer of all graphs.
_Attention: TypeAlias = tuple[LayerCache, AttentionOptions]


@dataclass
class StepGraphs:
    """Graphs of a model's steps for several numbers of tokens.

    Attributes:
        forward: returns logits. It may read only the tensors of its inputs, and must call the
            backend that it gets, if any, for all attention.
        backend: computes attention between the graphs of a step; None: attention is in the graph,
            and a step has one token of each request.
        logits: `[most sampling rows, vocab_size]`, the output of all graphs. They share it, because
            one output per size would take more memory.
    """

    sizes: list[int]
    forward: Callable[[StepInputs, AttentionBackend | None], torch.Tensor]
    backend: AttentionBackend | None
    buffers: TokenBuffers
    logits: torch.Tensor
    device: "CudaDevice"
    # What graphs hand to attention and get from it, each [largest size, num_heads, head_dim].
    _attended: tuple[torch.Tensor, torch.Tensor] | None = None
    _pieces: dict[int, tuple[list[Graph], list[_Attention]]] = field(default_factory=dict)

    def record(self, progress: Progress) -> None:
        """Record every size, the largest first: the others can reuse its memory."""
        for done, size in enumerate(reversed(self.sizes)):
            progress("recording CUDA graphs", done / len(self.sizes))
            # A step with a chunk has fewer logits than tokens. If there were as many, a model would
            # return those of all tokens in order, without a look at the places.
            num_logits = min(size if self.backend is None else size - 1, len(self.logits))
            inputs = self.buffers.inputs(size, num_logits)
            attentions: list[_Attention] = []
            launch = partial(self._launch, inputs, attentions, self.logits[:num_logits])
            self._pieces[size] = self.device.record(launch), attentions

    def _launch(
        self, inputs: StepInputs, attentions: list[_Attention], logits: torch.Tensor, cut: Cut
    ) -> None:
        attentions.clear()
        recorder = None if self.backend is None else _Recorder(self, attentions, cut)
        logits.copy_(self.forward(inputs, recorder))

    def size_for(self, batch: InputBatch) -> int | None:
        """Return the number of tokens to which a step is padded. None if no graph can run it."""
        num_tokens = len(batch.input_ids)
        if self.backend is None and num_tokens != len(batch.context_lens):
            return None  # the step has a prefill chunk
        if len(batch.logits_of) > len(self.logits):
            return None
        return next((size for size in self.sizes if size >= num_tokens), None)

    def run(self, size: int, num_logits: int, batch: PagedBatch | None = None) -> torch.Tensor:
        """Run the step filled in. Its logits `[num_logits, vocab_size]` hold until the next.

        `batch`: for the backend between the graphs.
        """
        graphs, attentions = self._pieces[size]
        num_tokens = 0 if batch is None else int(batch.query_starts[-1])
        for place, graph in enumerate(graphs):
            graph.replay()
            if place < len(attentions):
                cache, options = attentions[place]
                assert self._attended is not None
                assert self.backend is not None
                assert batch is not None
                queries, outputs = (each[:num_tokens] for each in self._attended)
                outputs.copy_(self.backend(queries, cache, batch, options))
        return self.logits[:num_logits]

    def buffers_for(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._attended is None:  # in the run before the first recording
            self._attended = torch.zeros_like(query), torch.zeros_like(query)
        queries, outputs = self._attended
        return queries[: len(query)], outputs[: len(query)]


@dataclass
class _Recorder:
    """Stands for the backend while a step is recorded: notes each call, and ends a graph there."""

    graphs: StepGraphs
    attentions: list[_Attention]
    cut: Cut

    name = "recorder"
    is_capturable = True

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        self.attentions.append((cache, options))
        queries, outputs = self.graphs.buffers_for(query)
        # A copy, because a graph's own memory may serve something else in the next graph.
        queries.copy_(query)
        self.cut()
        return outputs


class CudaDevice:
    """Records graphs on its own stream, and measures memory. Tests have one of their own.

    All graphs share one memory pool, as only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def memory(self) -> tuple[int, int, int]:
        """Return its size, what other processes use, and what tensors take, in bytes."""
        give_back_memory(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return total, others, torch.cuda.memory_allocated(self._device)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the peak memory during `run` in bytes, beyond what was allocated before `run`."""
        _, _, before = self.memory()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device)) - before

    def record(self, launch: Callable[[Cut], None]) -> list[Graph]:
        """Run `launch` twice, and return graphs of the kernels that it launches.

        `launch` gets a function that ends one graph and begins the next. What runs between the
        two when they are replayed, may change only the contents of tensors.
        """
        graphs: list[Graph] = []

        def begin() -> None:
            graphs.append(Graph())
            graphs[-1].capture_begin(pool=self._pool)

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        # Run it before recording, so that first-use setup (compiling, workspaces) stays outside.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            launch(lambda: None)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            begin()
            try:
                launch(cut)
            finally:
                graphs[-1].capture_end()
        current.wait_stream(self._stream)
        return graphs


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Free no tensor or graph of somebody else's while kernels are recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
