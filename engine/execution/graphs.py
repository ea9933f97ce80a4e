"""Decode steps as CUDA graphs: what a step launches is recorded once and replayed as one launch.

A decode of a small batch has some hundreds of kernels of a few microseconds each; launched one by
one they take longer to launch than to run. A graph has fixed shapes and addresses, so there is one
for each of a few sizes, a step is filled up to the next of them, and whatever changes from step to
step lies in `StepBuffers`.

`DecodeGraphs` owns the graphs and what they write to. Recording itself is a `GraphDevice`'s.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from stepscope.engine.execution.input_batch import InputBatch
from stepscope.engine.execution.step_buffers import StepBuffers, StepInputs

Progress = Callable[[str, float], None]

# Above it, a step takes long enough to be launched kernel by kernel meanwhile.
LARGEST_GRAPH = 512
# What a graph of some hundred kernels takes up beside its tensors (an estimate, to be measured).
GRAPH_BYTES = 8 << 20


def graph_sizes(most: int) -> list[int]:
    """Sizes to record for steps of up to `most` requests: 1, 2, 4, 8, every 16, and `most` itself.

    Above 8, at most 15 rows are padding: 6 % at 256 requests, while a decode is bound by reading
    weights that all rows share.
    """
    most = min(most, LARGEST_GRAPH)
    sizes = [size for size in (1, 2, 4, 8, *range(16, most + 1, 16)) if size <= most]
    return sizes if sizes[-1] == most else [*sizes, most]


class Graph(Protocol):
    """What was recorded; may be launched again and again."""

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    def record(self, launch: Callable[[], None]) -> Graph:
        """A graph of what `launch` launches. It has run at least once when this returns."""
        ...


class DecodeGraphs:
    """Graphs of a model's decode for several sizes of batch.

    Args:
        sizes: ascending.
        forward: logits `[size, vocab_size]` of inputs of a size; reads of them only tensors.
        buffers: have room for the largest size.
        logits: `[largest size, vocab_size]`, where graphs leave their results. One for all of
            them: results of their own would stay in memory for every size.
    """

    def __init__(
        self,
        sizes: list[int],
        forward: Callable[[StepInputs], torch.Tensor],
        buffers: StepBuffers,
        logits: torch.Tensor,
        device: GraphDevice,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._buffers = buffers
        self._logits = logits
        self._device = device
        self._graphs: dict[int, Graph] = {}

    def record(self, progress: Progress) -> None:
        """Record every size, the largest first: its memory has room for all others."""
        for done, size in enumerate(reversed(self.sizes)):
            progress("recording CUDA graphs", done / len(self.sizes))
            inputs = self._buffers.inputs(size)

            def launch(size: int = size, inputs: StepInputs = inputs) -> None:
                self._logits[:size].copy_(self._forward(inputs))

            self._graphs[size] = self._device.record(launch)

    def size_for(self, batch: InputBatch) -> int | None:
        """The size that a step is filled up to; None: it has to run kernel by kernel."""
        num_requests = len(batch.context_lens)
        if len(batch.input_ids) != num_requests:
            return None  # a chunk is among them
        return next((size for size in self.sizes if size >= num_requests), None)

    def run(self, batch: InputBatch, size: int, fed: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[len(batch.input_ids), vocab_size]`, good until the next step.

        Args:
            fed: tokens for the places `batch.fed_at`, on the device.
        """
        self._buffers.fill(batch, size, fed)
        self._graphs[size].replay()
        return self._logits[: len(batch.input_ids)]


class CudaGraphDevice:
    """Records on a stream of its own; all graphs share one pool of memory, one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], None]) -> Graph:
        # What is set up at first use (compiled kernels, workspaces) is not part of a graph.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            launch()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            launch()
        return graph
