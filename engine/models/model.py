"""`Model`, the interface of a model to a runner, and `StepContext`, its input beside the tokens."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.paged_attention import AttentionBackend, KVScales, PagedBatch, per_query_head


@dataclass(slots=True)
class StepContext:
    """The KV caches of one step, and the attention backend that reads them."""

    batch: PagedBatch
    key_caches: list[torch.Tensor]  # one for each layer
    value_caches: list[torch.Tensor]
    backend: AttentionBackend
    scales: list[KVScales] | None = None  # one for each layer, for caches in FP8

    def scales_of(self, layer: int) -> KVScales | None:
        return None if self.scales is None else self.scales[layer]

    def attend(self, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Call the attention backend on a layer's caches, with the scales of FP8 caches."""
        scales = self.scales_of(layer)
        if scales is not None:
            query = per_query_head(scales.key, query)
        key_cache, value_cache = self.key_caches[layer], self.value_caches[layer]
        output = self.backend(query, key_cache, value_cache, self.batch, **options)
        return output if scales is None else per_query_head(scales.value, output)


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
