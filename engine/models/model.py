"""What a runner asks of a model, and what it hands a model in one step.

Two models implement it: our lean decoder (`decoder.py`) and any decoder-only model of the
transformers library (`transformers_model.py`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch


@dataclass(slots=True)
class StepContext:
    """Where the keys and values of one step lie, and what attends over them."""

    batch: PagedBatch
    key_caches: list[torch.Tensor]  # one a layer
    value_caches: list[torch.Tensor]
    backend: AttentionBackend


class Model(Protocol):
    """A loaded model and the shape of its KV cache. All figures count the model's own weights."""

    name: str
    device: torch.device
    kv_dtype: torch.dtype
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
