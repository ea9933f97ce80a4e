"""The tensors of a model by name: of a checkpoint (`Weights`), or random for one without a file.

Those of a checkpoint are checked before the first one is read. Random ones are drawn on the model's
device. They are not zeros, because a GPU multiplies zeros at higher clocks than real weights.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open

from stepscope.engine.models.checkpoint import weight_files
from stepscope.engine.models.made_checkpoints import SEED
from stepscope.engine.protocol.knobs import ConfigError

Shape = tuple[int, ...]


# Tensors that are computed from the config, and a head that equals the embeddings.
_HARMLESS = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.(masked_)?bias_mask|attn\.(masked_)?bias"
    r"|^lm_head\.weight)$"
)
_OF_LAYERS = re.compile(r"\.(layers|h|blocks)\.\d+\.|^(model\.)?(embed_tokens|norm|lm_head)\.")


def refuse_unused(tensors: Iterable[str], name: str) -> None:
    """Refuse a checkpoint with tensors of layers that the model would not use."""
    unused = sorted(each for each in tensors if _OF_LAYERS.search(each))
    unused = [each for each in unused if not _HARMLESS.search(each)]
    if unused:
        raise ConfigError(
            "bad_weights",
            f"the config of {name} has no place for {len(unused)} tensors of its weights (first: "
            f"{unused[0]}): without them it would say something else",
        )


def check_tensors(
    missing: Sequence[str],
    mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    name: str,
) -> None:
    """Raise ConfigError if tensors are missing, or have another shape: (name, found, expected)."""
    if mismatched:
        tensor, found, expected = min(mismatched)
        raise ConfigError(
            "bad_weights",
            f"{len(mismatched)} weights of {name} are not of the shape its config says (first: "
            f"{tensor} is {list(found)}, not {list(expected)}): they do not belong together",
        )
    if missing:
        raise ConfigError(
            "bad_weights",
            f"the weights of {name} lack {len(missing)} tensors (first: {min(missing)}): "
            "copy the checkpoint again",
        )


class Weights:
    """Reads the safetensors files of one checkpoint that `checkpoint.check` found whole."""

    def __init__(self, folder: Path, name: str) -> None:
        """Find the tensors in `folder`. `name` is the model's name, for error messages."""
        self._name = name
        self._file_of: dict[str, Path] = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                self._file_of.update(dict.fromkeys(tensors.keys(), file))

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Raises ConfigError: names or shapes in the files are not those expected."""
        mismatched = []
        for file in sorted(set(self._file_of.values())):
            with safe_open(file, framework="pt") as tensors:
                for tensor in tensors.keys() & expected.keys():
                    found = tuple(tensors.get_slice(tensor).get_shape())
                    if found != expected[tensor]:
                        mismatched.append((tensor, found, expected[tensor]))
        check_tensors([*expected.keys() - self._file_of.keys()], mismatched, self._name)
        refuse_unused(self._file_of.keys() - expected.keys(), self._name)

    def has(self, tensor: str) -> bool:
        return tensor in self._file_of

    def read(self, tensor: str, dtype: torch.dtype) -> torch.Tensor:
        with safe_open(self._file_of[tensor], framework="pt") as tensors:
            return tensors.get_tensor(tensor).to(dtype)


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


WeightSource: TypeAlias = Weights | RandomWeights
