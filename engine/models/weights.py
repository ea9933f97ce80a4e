"""`Weights`: the tensors of a checkpoint by name, checked before the first one is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from stepscope.engine.models.checkpoint import refuse_file, weight_files
from stepscope.engine.protocol.settings.config_error import ConfigError

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Gives a model its tensors: `Weights` from files, or `random_weights.RandomWeights`."""

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Raise ConfigError if tensors are missing, or have another shape."""
        ...

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
        """Compare the names and shapes that a model expects with those in the files.

        Raises:
            ConfigError: tensors are missing, or have another shape.
        """
        missing = sorted(set(expected) - set(self._file_of))
        if missing:
            raise ConfigError(
                "bad_weights",
                f"the weights of {self._name} lack {len(missing)} tensors (first: {missing[0]}): "
                "copy the checkpoint again",
            )
        mismatched = []
        for file in sorted(set(self._file_of.values())):
            with self._open(file) as tensors:
                for tensor in tensors.keys() & expected.keys():
                    found = tuple(tensors.get_slice(tensor).get_shape())
                    if found != expected[tensor]:
                        mismatched.append((tensor, found))
        if mismatched:
            tensor, found = min(mismatched)
            raise ConfigError(
                "bad_weights",
                f"{len(mismatched)} weights of {self._name} are not of the shape its config says "
                f"(first: {tensor} is {list(found)}, not {list(expected[tensor])}): they do not "
                "belong together",
            )

    def read(self, tensor: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor to the CPU, in `dtype`.

        Raises:
            ConfigError: the file cannot be read.
        """
        with self._open(self._file_of[tensor]) as tensors:
            found: torch.Tensor = tensors.get_tensor(tensor)
        return found.to(dtype)

    def _open(self, file: Path) -> "safe_open":
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            refuse_file("bad_weights", f"the weights of {self._name} cannot be loaded", error)
