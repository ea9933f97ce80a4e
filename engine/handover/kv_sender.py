"""What hands keys and values over, and what is copied: the seams of this room."""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.protocol.commands import KVTicket


class KVSender(Protocol):
    """Gives keys and values to another engine. Belongs to the engine's thread."""

    def put(self, blocks: Sequence[int]) -> KVTicket | None:
        """Copy the content of `blocks`; None: there is no room for it now."""
        ...

    def free(self, ticket: KVTicket) -> None:
        """It was loaded, or never will be."""
        ...

    def close(self) -> None: ...


class FrameCopier(Protocol):
    """KV blocks as bytes, one frame a block; `execution.kv_frames.KVFrames` is the real one."""

    layout: str
    frame_bytes: int

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None: ...
    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None: ...
