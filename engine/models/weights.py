"""`Weights`: the tensors of a checkpoint by name, checked before the first one is read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from stepscope.engine.models.checkpoint import refuse_file, weight_files
from stepscope.engine.protocol.settings.knobs import ConfigError

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
    if missing:
        raise ConfigError(
            "bad_weights",
            f"the weights of {name} lack {len(missing)} tensors (first: {min(missing)}): "
            "copy the checkpoint again",
        )
    if mismatched:
        tensor, found, expected = min(mismatched)
        raise ConfigError(
            "bad_weights",
            f"{len(mismatched)} weights of {name} are not of the shape its config says (first: "
            f"{tensor} is {list(found)}, not {list(expected)}): they do not belong together",
        )


class WeightSource(Protocol):
    """Gives a model its tensors: `Weights` from files, or `random_weights.RandomWeights`."""

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Raise ConfigError if tensors are missing, or have another shape."""
        ...

    def has(self, tensor: str) -> bool: ...

    def read(self, tensor: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one tensor in `dtype`, on the CPU or on the model's device."""
        ...


class Weights:
    """Reads the safetensors files of one checkpoint, tensor by tensor."""

    def __init__(self, folder: Path, name: str) -> None:
        """Find the tensors in `folder`. `name` is the model's name, for error messages."""
        self._name = name
        self._file_of: dict[str, Path] = {}
        for file in weight_files(folder):
            with self._open(file) as tensors:
                self._file_of.update(dict.fromkeys(tensors.keys(), file))

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Compare expected names and shapes with the files'. Raises ConfigError if they differ."""
        check_tensors([*expected.keys() - self._file_of.keys()], (), self._name)
        mismatched = []
        for file in sorted(set(self._file_of.values())):
            with self._open(file) as tensors:
                for tensor in tensors.keys() & expected.keys():
                    found = tuple(tensors.get_slice(tensor).get_shape())
                    if found != expected[tensor]:
                        mismatched.append((tensor, found, expected[tensor]))
        check_tensors((), mismatched, self._name)
        refuse_unused(self._file_of.keys() - expected.keys(), self._name)

    def has(self, tensor: str) -> bool:
        return tensor in self._file_of

    def read(self, tensor: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor to the CPU, in `dtype`. Raises ConfigError: the file cannot be read."""
        with self._open(self._file_of[tensor]) as tensors:
            found: torch.Tensor = tensors.get_tensor(tensor)
        return found.to(dtype)

    def _open(self, file: Path) -> "safe_open":
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            refuse_file("bad_weights", f"the weights of {self._name} cannot be loaded", error)
