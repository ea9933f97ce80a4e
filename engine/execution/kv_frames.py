"""`KVFrames`: KV blocks as frames of bytes, for another engine of the same model to load."""

import warnings
from collections.abc import Sequence

import torch


class KVFrames:
    """Copies blocks of the KV cache of a runner to and from memory outside of it.

    A frame is what one block holds: the keys of all layers, then the values of all layers.

    Args:
        caches: keys of each layer, then values of each layer; `ModelRunner` says how shaped.
        layout: names the model and the shape of its blocks: what loads frames must have the same.
    """

    def __init__(self, caches: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        # As bytes: not every dtype of a cache can be indexed.
        self._caches = [cache.view(torch.uint8).flatten(1) for cache in caches]
        self.frame_bytes = sum(cache.shape[1] for cache in self._caches)

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None:
        """Copy `blocks` into `frames` of `memory`; it has all been copied when this returns."""
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts():
            rows = cache[torch.tensor(blocks, device=cache.device)]
            stored[places, begin : begin + rows.shape[1]] = rows.cpu()

    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `frames` of `memory` into `blocks`."""
        stored = self._frames(memory)
        places = torch.tensor(frames)
        for begin, cache in self._parts():
            rows = stored[places, begin : begin + cache.shape[1]]
            cache[torch.tensor(blocks, device=cache.device)] = rows.to(cache.device)

    def _parts(self) -> list[tuple[int, torch.Tensor]]:
        """The caches, and where in a frame their part begins."""
        parts, begin = [], 0
        for cache in self._caches:
            parts.append((begin, cache))
            begin += cache.shape[1]
        return parts

    def _frames(self, memory: memoryview) -> torch.Tensor:
        """[num_frames, frame_bytes], without a copy."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.frame_bytes)
