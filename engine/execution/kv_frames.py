"""`KVFrames`: KV blocks as frames of bytes, which another engine of the same model can load."""

import warnings
from collections.abc import Sequence

import torch


class KVFrames:
    """Copies blocks of a runner's KV cache to and from memory that engines share.

    A frame is the content of one block: the keys of all layers, then the values of all layers.

    Args:
        caches: keys of each layer, then values of each layer, shaped as in `ModelRunner`.
        layout: identifies the model and the shape of its blocks. Engines can exchange frames only
            if their layouts are equal.
    """

    def __init__(self, caches: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        # As bytes: not every dtype of a cache can be indexed.
        self._caches = [cache.view(torch.uint8).flatten(1) for cache in caches]
        self.frame_bytes = sum(cache.shape[1] for cache in self._caches)

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None:
        """Copy KV blocks into frames of `memory`. The copy is complete on return."""
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts():
            rows = cache[torch.tensor(blocks, device=cache.device)]
            stored[places, begin : begin + rows.shape[1]] = rows.cpu()

    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None:
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts():
            rows = stored[places, begin : begin + cache.shape[1]]
            cache[torch.tensor(blocks, device=cache.device)] = rows.to(cache.device)

    def _parts(self) -> list[tuple[int, torch.Tensor]]:
        parts, begin = [], 0
        for cache in self._caches:
            parts.append((begin, cache))
            begin += cache.shape[1]
        return parts

    def _frames(self, memory: memoryview) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.frame_bytes)
