"""`RandomWeights`: random tensors for a model without a file, drawn on the model's device.

They are not zeros, because a GPU multiplies zeros at higher clocks than real weights.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch

from stepscope.engine.models.random_model import SEED
from stepscope.engine.models.weights import Shape

# Size of the embeddings: small, because otherwise a model with tied embeddings repeats its last
# token for ever.
EMBEDDING_SCALE = 0.02
# Gain of the layers' outputs, so that they outweigh the embedding.
OUTPUT_GAIN = 2.0


class RandomWeights:
    """Draws a model's tensors on its device, each by its name and shape only; rounded to bf16."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes: Mapping[str, Shape] = {}

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Take note of the names and shapes of the tensors; there is no file to check."""
        self._shapes = expected

    def has(self, tensor: str) -> bool:
        return tensor in self._shapes

    def read(self, tensor: str, dtype: torch.dtype) -> torch.Tensor:
        return self.draw(tensor, self._shapes[tensor]).to(dtype)

    def draw(self, name: str, shape: Shape) -> torch.Tensor:
        """Draw a tensor in bf16: norms 1, biases 0, the rest so that products keep their size."""
        if len(shape) == 1:
            make: Callable[..., torch.Tensor] = torch.zeros if "bias" in name else torch.ones
            return make(shape, dtype=torch.bfloat16, device=self._device)
        digest = hashlib.sha256(f"{SEED} {name} {shape}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        weight = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        if name.endswith("embed_tokens.weight"):
            scale = EMBEDDING_SCALE
        else:
            gain = OUTPUT_GAIN if "o_proj" in name or "down_proj" in name else 1.0
            scale = gain * shape[1] ** -0.5
        return weight.mul_(scale).to(torch.bfloat16)
