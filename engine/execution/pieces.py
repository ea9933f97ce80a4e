"""Steps with prompt chunks, whose parts between attentions are replayed as CUDA graphs.

Such a step runs some hundreds of kernels; launching them one by one takes longer than running them
if there are few tokens or the model is small. Attention depends on the contexts of the step, so it
is planned and launched as in any step. Everything else depends only on the number of tokens. So
there are graphs for some numbers of tokens, and a step is padded to the next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stepscope.engine.execution.graphs import CudaGraphDevice, Cut, Graph, StepInputs, TokenBuffers
from stepscope.engine.execution.input_batch import InputBatch
from stepscope.engine.models.checkpoint import Progress
from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch

# With more tokens, kernels run long enough to hide the launches of the next.
LARGEST_STEP = 2048


def piece_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to record for steps of up to `most` tokens.

    Every 64 up to 512, then every 128. None is larger than `LARGEST_STEP`.
    """
    most = min(most, LARGEST_STEP)
    return [*(size for size in (*range(64, 512, 64), *range(512, most, 128)) if size < most), most]


class _Attention(NamedTuple):
    """A call of the backend between two graphs. The queries lie in the buffer of all graphs."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    options: dict[str, Any]


class _Attended(NamedTuple):
    """What graphs hand to attention and get from it, each `[largest size, num_heads, head_dim]`."""

    queries: torch.Tensor
    outputs: torch.Tensor


class PieceGraphs:
    """Graphs of a model's steps for several numbers of tokens.

    Args:
        forward: returns logits. It may read only the tensors of its inputs, and must call the
            backend that it gets for all attention.
        logits: `[most sampling rows, vocab_size]`, the output of all graphs.
    """

    def __init__(
        self,
        sizes: list[int],
        forward: Callable[[StepInputs, AttentionBackend], torch.Tensor],
        backend: AttentionBackend,
        buffers: TokenBuffers,
        logits: torch.Tensor,
        device: CudaGraphDevice,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._backend = backend
        self.buffers = buffers
        self._logits = logits
        self._device = device
        self._attended: _Attended | None = None
        self._pieces: dict[int, tuple[list[Graph], list[_Attention]]] = {}

    def record(self, progress: Progress) -> None:
        """Record every size, the largest first: the others can reuse its memory."""
        for done, size in enumerate(reversed(self.sizes)):
            progress("recording CUDA graphs", done / len(self.sizes))
            num_logits = min(size, len(self._logits))
            inputs = self.buffers.inputs(size, num_logits)
            attentions: list[_Attention] = []

            def launch(
                cut: Cut,
                num_logits: int = num_logits,
                inputs: StepInputs = inputs,
                attentions: list[_Attention] = attentions,
            ) -> None:
                attentions.clear()
                recorder = _Recorder(self._buffers_for, attentions, cut)
                self._logits[:num_logits].copy_(self._forward(inputs, recorder))

            self._pieces[size] = self._device.record(launch), attentions

    def size_for(self, batch: InputBatch) -> int | None:
        """Return the number of tokens to which a step is padded. None if no graph can run it."""
        if len(batch.logits_of) > len(self._logits):
            return None
        return next((size for size in self.sizes if size >= len(batch.input_ids)), None)

    def run(self, size: int, num_logits: int, batch: PagedBatch) -> torch.Tensor:
        """Run the step filled in. Its logits `[num_logits, vocab_size]` hold until the next."""
        graphs, attentions = self._pieces[size]
        num_tokens = int(batch.query_starts[-1])
        for place, graph in enumerate(graphs):
            graph.replay()
            if place < len(attentions):
                keys, values, options = attentions[place]
                assert self._attended is not None
                queries, outputs = (each[:num_tokens] for each in self._attended)
                outputs.copy_(self._backend(queries, keys, values, batch, **options))
        return self._logits[:num_logits]

    def _buffers_for(self, query: torch.Tensor) -> _Attended:
        if self._attended is None:  # in the run before the first recording
            self._attended = _Attended(torch.zeros_like(query), torch.zeros_like(query))
        return _Attended(*(each[: len(query)] for each in self._attended))


class _Recorder:
    """Stands for the backend while a step is recorded: notes each call, and ends a graph there."""

    name = "recorder"
    is_capturable = True

    def __init__(
        self,
        buffers_for: Callable[[torch.Tensor], _Attended],
        attentions: list[_Attention],
        cut: Cut,
    ) -> None:
        self._buffers_for = buffers_for
        self._attentions = attentions
        self._cut = cut

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: PagedBatch,
        **options: Any,
    ) -> torch.Tensor:
        self._attentions.append(_Attention(key_cache, value_cache, options))
        queries, outputs = self._buffers_for(query)
        # A copy, because a graph's own memory may serve something else in the next graph.
        queries.copy_(query)
        self._cut()
        return outputs
