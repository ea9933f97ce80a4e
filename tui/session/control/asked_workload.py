"""`AskedWorkload`: the synthetic workload of an engine, for the operator to change.

Telemetry shows a new workload up to a second late, and a second change within that second must not
undo the first. So until telemetry shows a change, the workload that was requested last counts.

Operators type it: `rate=2 document_share=0.3`, or `off`. Fields that are not typed keep their
values, if the engine reports them.
"""

from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.workload.arrivals import fields_of
from stepscope.recordings.state.audit_text import value_text
from stepscope.recordings.state.session import SessionState


class _PublishedWorkload(NamedTuple):
    """The workload of an engine as the engine's telemetry reports it."""

    engine_id: str | None
    workload: str | None
    spec: dict[str, KnobValue] | None


class AskedWorkload:
    """The workload that was requested last, until telemetry shows it; for the screen's thread."""

    def __init__(self) -> None:
        self._asked: tuple[WorkloadSpec | None, _PublishedWorkload] | None = (
            None  # the workload requested last, and what was published at that time
        )

    def ask(self, spec: WorkloadSpec | None, state: SessionState) -> None:
        self._asked = spec, _published(state)

    def forget(self) -> None:
        """Drop the requested workload. Call this if the engine refused it or did not answer."""
        self._asked = None

    def look(self, state: SessionState) -> None:
        """Drop the requested workload if telemetry has shown a change since the request."""
        if self._asked is not None and self._asked[1] != _published(state):
            self._asked = None

    def now(self, state: SessionState) -> WorkloadSpec | None:
        """Return the workload that a change starts from; None if none runs or it is unknown."""
        self.look(state)
        return published_workload(state.workload_spec) if self._asked is None else self._asked[0]

    def note(self, state: SessionState) -> str:
        """Return a line about the current workload, for the prompt in which it is changed."""
        spec = self.now(state)
        if spec is not None:
            return f"now {workload_text(spec)}; fields you leave out stay"
        if self._asked is not None or state.workload is None:
            return f"now none; fields you leave out are {workload_text(WorkloadSpec())}"
        return (
            f"now {state.workload}; its other fields are unknown here: fields you leave out become "
            f"{workload_text(WorkloadSpec())}"
        )


def _published(state: SessionState) -> _PublishedWorkload:
    engine_id = None if state.info is None else state.info.engine_id
    return _PublishedWorkload(engine_id, state.workload, state.workload_spec)


OFF = "off"
NO_VALUE = "none"  # clears a field that may be empty
EXAMPLE = "rate=2 document_share=0.1 output_tokens=64"


def published_workload(published: dict[str, KnobValue] | None) -> WorkloadSpec | None:
    """Return the workload that telemetry reports; None if there is none, or it cannot be read."""
    try:
        return None if published is None else msgspec.convert(published, WorkloadSpec)
    except msgspec.ValidationError:
        return None


def workload_text(spec: WorkloadSpec) -> str:
    """Return a workload as an operator may type it."""
    return " ".join(f"{name}={value_text(value)}" for name, value in fields_of(spec).items())


def parse_workload(text: str, now: WorkloadSpec | None = None) -> WorkloadSpec | None:
    """Return the workload that a typed text means; None means to stop the one that runs.

    Args:
        now: the workload whose fields `text` changes; None means the default workload.

    Raises:
        ValueError: the text is not valid; the message says what would be.
    """
    words = text.split()
    if words == [OFF]:
        return None
    fields = {field.name: field.type for field in msgspec.structs.fields(WorkloadSpec)}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in fields:
            raise ValueError(f"{word!r}: off or {EXAMPLE}; there are {', '.join(fields)}")
        values[name] = None if value == NO_VALUE else value
        if value in ("on", "off") and _is_switch(fields[name]):
            values[name] = value == "on"
    if not values:
        raise ValueError(f"write off, or {EXAMPLE}")
    try:
        before = {} if now is None else fields_of(now)
        return msgspec.convert(before | values, WorkloadSpec, strict=False)
    except msgspec.ValidationError as error:
        wrong = in_words(error)
        expected = wrong.message.partition(", got ")[0]
        given = values.get(wrong.field or "") or NO_VALUE
        raise ValueError(f"{wrong.field}: {expected}, got {given!r}") from error


def _is_switch(annotation: object) -> bool:
    return get_origin(annotation) is Annotated and get_args(annotation)[0] is bool
