"""What a runner asks of a model, and what it hands a model in one step.

Two models implement it: our lean decoder (`decoder.py`) and any decoder-only model of the
transformers library (`transformers_model.py`).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.fp8 import KVScales, per_query_head
from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch


@dataclass(slots=True)
class StepContext:
    """Where the keys and values of one step lie, and what attends over them."""

    batch: PagedBatch
    key_caches: list[torch.Tensor]  # one a layer
    value_caches: list[torch.Tensor]
    backend: AttentionBackend
    scales: list[KVScales] | None = None  # one a layer, of caches in FP8

    def scales_of(self, layer: int) -> KVScales | None:
        return None if self.scales is None else self.scales[layer]

    def attend(self, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """`AttentionBackend` over the caches of a layer; `options` are its own."""
        scales = self.scales_of(layer)
        if scales is not None:
            query = per_query_head(scales.key, query)
        key_cache, value_cache = self.key_caches[layer], self.value_caches[layer]
        output = self.backend(query, key_cache, value_cache, self.batch, **options)
        return output if scales is None else per_query_head(scales.value, output)


class Model(Protocol):
    """A loaded model and the shape of its KV cache. All figures count the model's own weights."""

    name: str
    device: torch.device
    dtype: torch.dtype  # of weights, keys and values as they are computed
    kv_shape: KVShape

    @property
    def implementation(self) -> str:
        """Whose layers run, and how, for people."""
        ...

    @property
    def is_thread_invariant(self) -> bool:
        """Whether a step has the same result, to the bit, with any number of CPU threads."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether what a step launches depends on nothing but the shapes of its inputs."""
        ...

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        ...

    @property
    def flops_per_token(self) -> int:
        """Multiplications and additions of one token in the weights of the layers.

        Left out, because they depend on the step: scores over the context, and the logits, which
        only the last token of a prompt needs.
        """
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        logits_of: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [len(logits_of), vocab_size] after the tokens at `logits_of` of the step.

        Args:
            input_ids: [num_tokens], all requests of the step one after the other.
            positions: [num_tokens], of each token in its request.
            logits_of: indices into the tokens; may be empty.
        """
        ...
