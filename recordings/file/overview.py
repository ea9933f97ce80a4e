"""`Overview`: what a list of recordings shows of a file, read from its beginning and end.

Finds landmarks in a recording without decoding its steps.

Landmarks are marks (notes by people), knob changes and workload changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Audited, KnobsChanged, Mark, Telemetry
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.incident import incident_in
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.audit_text import typed_text

if TYPE_CHECKING:
    from stepscope.recordings.file.reader import (
        Recording,
    )  # needs mcap

_TOPICS = (wire.TOPICS[Mark], wire.TOPICS[KnobsChanged], wire.TOPICS[Audited])


class Landmark(NamedTuple):
    """A mark, knob change or workload change. `step` is the first step after it."""

    step: int
    text: str
    kind: Literal["mark", "knobs", "workload", "step"]


def landmarks(recording: "Recording") -> Iterator[Landmark]:
    """All landmarks, in file order."""
    for number in range(recording.num_chunks):
        for _, message in messages_in(recording, number):
            if (found := landmark_of(message)) is not None:
                yield found


def messages_in(recording: "Recording", number: int) -> Iterator[tuple[int, Telemetry]]:
    """Yield the messages of a chunk that may be landmarks, each with its index in the chunk."""
    frames = recording.chunk(number).frames
    for place, topic in enumerate(frames.topics):
        if topic in _TOPICS:
            # 'stepscope verify' reports what cannot be read.
            with contextlib.suppress(msgspec.DecodeError):
                yield place, wire.decode(frames[place].payload)


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


class Overview(NamedTuple):
    """Facts about one recording. If `error` is set, it tells why the other fields are empty."""

    duration_s: float | None = None
    num_steps: int | None = None
    engine: str = ""
    model: str = ""
    is_cut: bool = False  # never finished, or damaged
    error: str | None = None
    incident: str | None = None  # the incident that it was kept for, in one line


def overview(path: Path) -> Overview:
    """Read the overview of a file. Any problem becomes its `error`."""
    try:
        with Recording(path) as recording:
            incident = incident_in(recording.metadata)
            first, last = recording.first_step, recording.last_step
            return Overview(
                recording.duration_s,
                0 if first is None or last is None else last - first + 1,
                recording.metadata.get("engine_name", recording.info.name),
                recording.metadata.get("model", recording.info.model),
                recording.truncated,
                incident=None if incident is None else incident.text,
            )
    except (RecordingError, OSError) as error:
        return Overview(error=str(error).removeprefix(f"{path} "))


def recordings_in(folder: Path) -> list[Path]:
    """Files in a folder with the name of a recording, including those being written."""
    try:
        found = [*folder.glob("*.mcap"), *folder.glob(f"*.mcap{PART_SUFFIX}")]
        return sorted(path for path in found if path.is_file())
    except OSError:
        return []
