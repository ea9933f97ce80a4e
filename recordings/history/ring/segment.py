"""`Segment`: consecutive messages of a session, and a keyframe of the state before them."""

import copy
from array import array
from typing import NamedTuple

from stepscope.recordings.packing.payloads import CompressedPayloads
from stepscope.recordings.state.blocks import PackedBlocks
from stepscope.recordings.state.session import SessionState

_VIEW_BYTES = 480  # estimated size of a copied request
_ENTRY_BYTES = 100  # estimated size of an entry for a shared request


class Keyframe(NamedTuple):
    """A stored state. Its blocks are compressed, because for many blocks they take most memory.

    `sequence` is the number of the message that led to the state. It is None if unknown, or if
    messages before it are missing and no snapshot has corrected the state.
    """

    state: SessionState
    blocks: PackedBlocks | None
    sequence: int | None

    @classmethod
    def of(cls, state: SessionState, sequence: int | None) -> "Keyframe":
        blocks = state.blocks
        bare = copy.copy(state)
        bare.blocks = None
        return cls(bare.copy(), None if blocks is None else blocks.pack(), sequence)

    def restore(self) -> SessionState:
        state = self.state.copy()
        if self.blocks is not None:
            state.blocks = self.blocks.unpack()
        return state

    @property
    def num_bytes(self) -> int:
        views = self.state.requests.values()
        num_own = sum(view.status == "running" for view in views)
        return (
            (0 if self.blocks is None else self.blocks.num_bytes)
            + num_own * _VIEW_BYTES
            + len(views) * _ENTRY_BYTES
        )


class Segment:
    __slots__ = ("first_number", "keyframe", "num_bytes", "payloads", "step_places", "steps")

    def __init__(self, keyframe: Keyframe, first_number: int) -> None:
        self.keyframe = keyframe
        self.first_number = first_number  # number of its first message in the ring
        self.payloads: list[bytes] | CompressedPayloads = []
        self.steps = array("q")
        self.step_places = array("q")  # where in `payloads` each step is
        self.num_bytes = keyframe.num_bytes

    def end(self) -> None:
        """Compress the messages. Call it when no more will be added."""
        if isinstance(self.payloads, list):
            self.payloads = CompressedPayloads(self.payloads)
            self.num_bytes = self.keyframe.num_bytes + self.payloads.num_bytes
