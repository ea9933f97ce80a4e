"""`Model`, the interface of a model to a runner, and `StepContext`, its input beside the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.paged_attention import (
    AttentionBackend,
    AttentionOptions,
    LayerCache,
    PagedBatch,
    per_query_head,
)


@dataclass(slots=True)
class StepContext:
    """The KV caches of one step, and the attention backend that reads them."""

    batch: PagedBatch
    caches: Sequence[LayerCache]  # one for each layer
    backend: AttentionBackend

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Call the attention backend on a layer's cache, with the scales of an FP8 cache."""
        cache = self.caches[layer]
        if cache.scales is None:
            return self.backend(query, cache, self.batch, options)
        query = per_query_head(cache.scales.key, query)
        output = self.backend(query, cache, self.batch, options)
        return per_query_head(cache.scales.value, output)


class Model(Protocol):
    """A loaded model and the shape of its KV cache.

    Attributes:
        implementation: for people: whether our decoder or transformers runs the layers, and how.
        dtype: of the weights, and of keys and values before they are stored.
        weight_bytes: memory of the weights.
        flops_per_token: multiplications and additions for one token with the weights of the layers.
            Leaves out attention scores over the context, and the logits, which only the last token
            of a prompt needs: both depend on the step.
        is_thread_invariant: a step has the same result, to the bit, with any number of CPU threads.
        is_capturable: the kernels of a step depend only on input shapes, so that CUDA graphs work.
    """

    name: str
    architecture: str
    implementation: str
    device: torch.device
    dtype: torch.dtype
    kv_shape: KVShape
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    flops_per_token: int
    is_thread_invariant: bool
    is_capturable: bool

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        logits_of: torch.Tensor,
    ) -> torch.Tensor:
        """Run one step, and return logits [len(logits_of), vocab_size].

        Args:
            input_ids: [num_tokens], all requests of the step one after the other.
            positions: [num_tokens], of each token in its request.
            logits_of: indices of the tokens whose logits are needed; may be empty.
        """
