"""`KVFrames`: KV blocks as frames of bytes, which another engine of the same model can load."""

import warnings
from collections.abc import Sequence
from itertools import accumulate

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
        flat = [cache.view(torch.uint8).flatten(1) for cache in caches]
        ends = list(accumulate(cache.shape[1] for cache in flat))
        self.frame_bytes = ends[-1]
        self._parts = list(zip([0, *ends[:-1]], flat, strict=True))

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None:
        """Copy KV blocks into frames of `memory`. The copy is complete on return."""
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts:
            rows = cache[torch.tensor(blocks, device=cache.device)]
            stored[places, begin : begin + rows.shape[1]] = rows.cpu()

    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None:
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts:
            rows = stored[places, begin : begin + cache.shape[1]]
            cache[torch.tensor(blocks, device=cache.device)] = rows.to(cache.device)

    def _frames(self, memory: memoryview) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.frame_bytes)
