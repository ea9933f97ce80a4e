"""`FileEvents`: finds events in a whole file, including parts that a replay has not played yet.

Its thread has its own file handle and rests between chunks, so that it delays nothing else. It
decodes a step only if its bytes contain the name of an event. Late tokens have no such name, so
`FileLatency` finds them by computing the waits of all steps.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.wire import (
    Aborted,
    Audited,
    KnobsChanged,
    Mark,
    Preempted,
    Rejected,
    RequestEvent,
)
from stepscope.recordings.file.landmarks import messages_in
from stepscope.recordings.file.loaded_chunk import KEYFRAME
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.replay.event_steps import EventSteps, Noted
from stepscope.recordings.replay.file_search import FileSearch
from stepscope.recordings.state.series.events import (
    AuditedStep,
    EventKind,
    SessionEvent,
    audit_event,
    knobs_event,
    mark_event,
)

_MAX_SPREAD = 512  # cells of the widest bar
_PAUSE_S = 0.005  # between two chunks
_FIRST_PAUSE_S = 0.3  # the first screen is drawn first
_OF_REQUESTS: dict[type[msgspec.Struct], EventKind] = {
    Preempted: "preempt",
    Aborted: "abort",
    Rejected: "reject",
}
# How the tags of these events are encoded in a file.
_WORDS = [msgspec.msgpack.encode(each.__struct_config__.tag) for each in _OF_REQUESTS]


class _EventFields(msgspec.Struct):
    """The fields that are decoded of a step (packed or not) or a status message."""

    step: int
    tokens_ns: int = 0
    time_ns: int = 0
    events: list[RequestEvent] = []


_decode_fields = msgspec.msgpack.Decoder(_EventFields).decode


class _ByStep(NamedTuple):
    """An event that a person or client caused (mark, knob change, command), and its message."""

    event: SessionEvent
    message: Mark | KnobsChanged | Audited


class FileEvents:
    """The events of one file. `search.start()` begins the search.

    Attributes:
        search: the searching thread.
        found: marks and knob changes found so far, by step.
        changes: knob changes found so far, oldest first.
        audited: other commands found so far, accepted or refused, oldest first.
    """

    def __init__(self, path: Path) -> None:
        self.search = FileSearch(path, "events of the file", self._look, _FIRST_PAUSE_S)
        self._of_engine: Sequence[SessionEvent] = ()
        self._of_requests = {kind: EventSteps() for kind in _OF_REQUESTS.values()}
        self.found: Sequence[SessionEvent] = ()
        self.changes: Sequence[KnobsChanged] = ()
        self.audited: Sequence[AuditedStep] = ()

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return self.search.is_done

    def next(self, step: int, direction: int, kinds: Collection[str]) -> SessionEvent | None:
        """The nearest event found so far in a later step (direction 1) or an earlier one (-1)."""
        caused = [each for each in (*self.found, *self._of_engine) if each.kind in kinds]
        found = [each for each in caused if (each.step - step) * direction > 0]
        for kind, steps in self._of_requests.items():
            if kind in kinds and (event := steps.next(step, direction)) is not None:
                found.append(event)
        return min(found, key=lambda each: (each.step - step) * direction, default=None)

    def landmarks(self) -> list[SessionEvent]:
        """The events to show on the bar of the whole file: marks, knob changes and preemptions."""
        return [*self.found, *self._of_requests["preempt"].spread(_MAX_SPREAD)]

    # The thread

    def _look(self, recording: Recording) -> None:
        for number in range(recording.num_chunks):
            self._take_in(list(_caused_in(recording, number)))
            for fields in _fields_in(recording, number):
                for event in fields.events:
                    if isinstance(event, Noted):
                        time_ns = fields.tokens_ns or fields.time_ns
                        steps = self._of_requests[_OF_REQUESTS[type(event)]]
                        steps.add(max(fields.step, 0), time_ns, event)
            self.search.rest(_PAUSE_S)
            if self.search.is_stopping:
                return

    def _take_in(self, caused: list[_ByStep]) -> None:
        """Add events that people or clients caused.

        Lists are replaced, so that readers see all events of a chunk or none.
        """
        if not caused:
            return
        changes = [each.message for each in caused if isinstance(each.message, KnobsChanged)]
        if changes:
            known = {each.version: each for each in (*self.changes, *changes)}
            self.changes = [known[version] for version in sorted(known)]
        audited = [
            AuditedStep(each.event.step, each.message)
            for each in caused
            if isinstance(each.message, Audited)
        ]
        if audited:
            self.audited = sorted([*self.audited, *audited], key=lambda each: each.entry.time_ns)
        events = {each.event for each in caused}
        of_engine = {each for each in events if each.kind == "engine"}
        if of_engine:
            self._of_engine = _by_step({*self._of_engine, *of_engine})
        if events - of_engine:
            self.found = _by_step({*self.found, *(events - of_engine)})


def _by_step(events: set[SessionEvent]) -> list[SessionEvent]:
    return sorted(events, key=lambda each: (each.step, each.time_ns))


def _caused_in(recording: Recording, number: int) -> Iterator[_ByStep]:
    """The events in a chunk that people or clients caused: marks, knob changes, other commands.

    Refused commands are included.
    """
    for place, message in messages_in(recording, number):
        if isinstance(message, Mark):
            yield _ByStep(mark_event(message), message)
        elif isinstance(message, KnobsChanged):
            if (event := knobs_event(message)) is not None:
                yield _ByStep(event, message)
        elif isinstance(message, Audited):
            step = recording.step_before(Position(number, place)) or 0
            if (event := audit_event(message, step)) is not None:
                yield _ByStep(event, message)


def _fields_in(recording: Recording, number: int) -> Iterator[_EventFields]:
    """Decode messages of a chunk in which requests were preempted, aborted or rejected."""
    frames = recording.chunk(number).frames
    for place in sorted({place for word in _WORDS for place in frames.places_of(word)}):
        frame = frames[place]
        if frame.topic != KEYFRAME:
            # 'stepscope verify' reports what cannot be read.
            with contextlib.suppress(msgspec.DecodeError):
                yield _decode_fields(frame.payload)
