"""The interfaces for transferring keys and values, and for copying KV blocks."""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.protocol.commands import KVTicket


class KVSender(Protocol):
    """Transfers keys and values to another engine. Use it on the engine's thread."""

    def put(self, blocks: Sequence[int]) -> KVTicket | None:
        """Copy the content of KV blocks for the other engine, and return the ticket of the copy.

        None if there is no room now.
        """
        ...

    def free(self, ticket: KVTicket) -> None:
        """Free the copy that a ticket names. Call it once the copy was loaded, or never will be."""
        ...

    def close(self) -> None: ...


class FrameCopier(Protocol):
    """Copies KV blocks as bytes, one frame per block. See `execution.kv_frames.KVFrames`."""

    layout: str
    frame_bytes: int

    def store(self, blocks: Sequence[int], memory: memoryview, frames: Sequence[int]) -> None: ...
    def load(self, memory: memoryview, frames: Sequence[int], blocks: Sequence[int]) -> None: ...
