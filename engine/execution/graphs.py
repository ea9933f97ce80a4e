"""Decode steps as CUDA graphs: a step's kernels are recorded once and replayed as one launch.

A decode of a small batch runs some hundreds of kernels of a few microseconds each. Launching them
one by one takes longer than running them. A graph has fixed shapes and addresses. So there is a
graph for each of a few batch sizes, and a step is padded to the next size. Inputs that change from
step to step lie in `StepBuffers`.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from stepscope.engine.execution.input_batch import InputBatch
from stepscope.engine.models.checkpoint import Progress
from stepscope.kernels.paged_attention import BatchTensors, PagedBatch, to_device


class StepInputs(NamedTuple):
    """A model's inputs. Those of `StepBuffers` are decodes: one token per request."""

    input_ids: torch.Tensor  # [size] int64, like the next two
    positions: torch.Tensor
    logits_of: torch.Tensor
    batch: PagedBatch  # those of `StepBuffers` have host arrays for the longest possible contexts


class TokenBuffers:
    """Ids, positions, slots and places of logits for up to `most` tokens.

    The tokens after a step's last are padding. They write to `scratch_slot`, a KV slot that no
    request uses.
    """

    def __init__(self, most: int, block_size: int, scratch_slot: int, device: torch.device) -> None:
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._device = device
        is_cuda = device.type == "cuda"
        # One tensor, so that one copy moves all four.
        self._host = torch.zeros(4, most, dtype=torch.int64, pin_memory=is_cuda)
        self.rows = torch.zeros(4, most, dtype=torch.int64, device=device)
        self.rows[2] = scratch_slot
        self._copied = torch.cuda.Event() if is_cuda else None

    def inputs(self, size: int, num_logits: int) -> StepInputs:
        """Return inputs that are views of the first `size` tokens, of any requests."""
        input_ids, positions, slots, logits_of = self.rows
        return StepInputs(
            input_ids[:size],
            positions[:size],
            logits_of[:num_logits],
            PagedBatch(
                query_starts=np.array([0, size]),
                context_lens=np.array([size]),
                block_tables=np.zeros((1, 1), dtype=np.int64),
                slot_mapping=slots[:size],
                block_size=self._block_size,
                device=self._device,
            ),
        )

    def fill(self, batch: InputBatch, fed: torch.Tensor | None = None) -> None:
        """Copy the inputs of a step to the device.

        `fed`: tokens for the positions `batch.fed_at`, on the device. The step before samples them.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies must have left host memory
        rows = self._host.numpy()
        for row, array, filler in (
            (0, batch.input_ids, 0),
            (1, batch.positions, 0),
            (2, batch.slot_mapping, self._scratch_slot),
            (3, batch.logits_of, 0),
        ):
            rows[row, : len(array)] = array
            rows[row, len(array) :] = filler
        self.rows.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if fed is not None:
            self.rows[0].index_copy_(0, to_device(np.array(batch.fed_at), self._device), fed)


class StepBuffers:
    """Inputs for up to `most` requests of up to `max_model_len` tokens, one in the step each.

    The rows after a step's last request are padding. They read nothing.
    """

    def __init__(
        self,
        most: int,
        max_model_len: int,
        block_size: int,
        scratch_slot: int,
        device: torch.device,
    ) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._device = device
        num_blocks = -(-max_model_len // block_size)
        is_cuda = device.type == "cuda"
        self._tokens = TokenBuffers(most, block_size, scratch_slot, device)
        self._host_lens = torch.zeros(most, dtype=torch.int32, pin_memory=is_cuda)
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(most * num_blocks, dtype=torch.int32, pin_memory=is_cuda)
        self._staged_tables = torch.zeros(most * num_blocks, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, num_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def inputs(self, size: int) -> StepInputs:
        """Return inputs that are views of the first `size` rows."""
        input_ids, positions, slots, _ = (row[:size] for row in self._tokens.rows)
        return StepInputs(
            input_ids,
            positions,
            self._rows[:size],
            PagedBatch(
                query_starts=np.arange(size + 1),
                context_lens=np.full(size, self._max_model_len),
                block_tables=np.zeros((size, self._tables.shape[1]), dtype=np.int64),
                slot_mapping=slots,
                block_size=self._block_size,
                device=self._device,
                tensors=BatchTensors(
                    self._starts[: size + 1], self._lens[:size], self._tables[:size]
                ),
            ),
        )

    def fill(self, batch: InputBatch, size: int, fed: torch.Tensor | None = None) -> None:
        """Copy a step with one token per request, padded to `size` rows, as `TokenBuffers` does."""
        self._tokens.fill(batch, fed)
        if self._copied is not None:
            self._copied.synchronize()
        count = len(batch.input_ids)
        lens = self._host_lens.numpy()
        lens[:count] = batch.context_lens
        lens[count:size] = 0
        width = batch.block_tables.shape[1]
        used = count * width
        self._host_tables.numpy()[:used] = batch.block_tables.ravel()
        self._lens[:size].copy_(self._host_lens[:size], non_blocking=True)
        # Copy only the width of the longest context, because the whole table may be megabytes.
        self._staged_tables[:used].copy_(self._host_tables[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._tables[:count, :width].copy_(self._staged_tables[:used].view(count, width))


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


Graph: TypeAlias = torch.cuda.CUDAGraph
Cut: TypeAlias = Callable[[], None]


class DecodeGraphs:
    """Graphs of a model's decode for several batch sizes.

    Args:
        forward: returns logits `[size, vocab_size]`. It may read only the tensors of its inputs.
        logits: `[largest size, vocab_size]`, the output of all graphs. They share it, because one
            output per size would take more memory.
    """

    def __init__(
        self,
        sizes: list[int],
        forward: Callable[[StepInputs], torch.Tensor],
        buffers: StepBuffers,
        logits: torch.Tensor,
        device: "CudaGraphDevice",
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self.buffers = buffers
        self._logits = logits
        self._device = device
        self._graphs: dict[int, Graph] = {}

    def record(self, progress: Progress) -> None:
        """Record a graph for every size, the largest first: the others can reuse its memory."""
        for done, size in enumerate(reversed(self.sizes)):
            progress("recording CUDA graphs", done / len(self.sizes))
            inputs = self.buffers.inputs(size)

            def launch(_: Cut, size: int = size, inputs: StepInputs = inputs) -> None:
                self._logits[:size].copy_(self._forward(inputs))

            [self._graphs[size]] = self._device.record(launch)

    def size_for(self, batch: InputBatch) -> int | None:
        """Return the batch size to which a step is padded. None if no graph can run the step."""
        num_requests = len(batch.context_lens)
        if len(batch.input_ids) != num_requests:
            return None  # the step has a prefill chunk
        return next((size for size in self.sizes if size >= num_requests), None)

    def run(self, size: int, num_tokens: int) -> torch.Tensor:
        """Run the step filled in. Its logits `[num_tokens, vocab_size]` hold until the next."""
        self._graphs[size].replay()
        return self._logits[:num_tokens]


class CudaGraphDevice:
    """Records on its own stream. All graphs share one memory pool, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

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
