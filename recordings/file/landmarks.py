"""Finds landmarks in a recording without decoding its steps.

Landmarks are marks (notes by people), knob changes and workload changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Audited, KnobsChanged, Mark
from stepscope.recordings.state.audit_text import typed_text

if TYPE_CHECKING:
    from stepscope.recordings.file.reader import Recording  # needs mcap

_TOPICS = (wire.TOPICS[Mark], wire.TOPICS[KnobsChanged], wire.TOPICS[Audited])


class Landmark(NamedTuple):
    """A mark, knob change or workload change. `step` is the first step after it."""

    step: int
    text: str
    kind: Literal["mark", "knobs", "workload", "step"]


def landmarks(recording: "Recording") -> Iterator[Landmark]:
    """All landmarks, in file order."""
    for number in range(recording.num_chunks):
        frames = recording.chunk(number).frames
        for place, topic in enumerate(frames.topics):
            if topic in _TOPICS:
                # 'stepscope verify' reports what cannot be read.
                with contextlib.suppress(msgspec.DecodeError):
                    if (found := landmark_of(wire.decode(frames[place].payload))) is not None:
                        yield found


def landmark_of(message: object) -> Landmark | None:
    """The landmark that a message stands for; None if the message is no landmark."""
    if isinstance(message, Mark):
        return Landmark(message.step, message.text, "mark")
    if isinstance(message, KnobsChanged) and message.new:
        text = ", ".join(f"{name}={typed_text(value)}" for name, value in message.new.items())
        return Landmark(message.effective_step, text, "knobs")
    if isinstance(message, Audited) and message.command == "SetWorkload":
        # A refused command has no step, because it changed nothing.
        step = message.effective_step
        return None if step is None else Landmark(step, "the workload", "workload")
    return None


def find_landmark(found: Sequence[Landmark], text: str) -> Landmark | None:
    """The last landmark with that text, or else the last one whose text contains it."""
    for matches in (
        [each for each in found if each.text == text],
        [each for each in found if text.lower() in each.text.lower()],
    ):
        if matches:
            return matches[-1]
    return None
