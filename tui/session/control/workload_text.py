"""The synthetic workload of an engine as operators type it: `rate=2 document_share=0.3`, or `off`.

Fields that are not typed keep their values, if the engine reports them.
"""

from typing import Any, get_args

import msgspec

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.workload.arrivals import fields_of
from stepscope.recordings.state.audit_text import value_text
from stepscope.recordings.state.session import SessionState

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
    return " ".join(f"{name}={value_text(value)}" for name, value in fields_of(spec).items())


def workload_note(state: SessionState) -> str:
    """Return a line about the current workload, for the prompt in which it is changed."""
    spec, default = published_workload(state.workload_spec), workload_text(WorkloadSpec())
    if spec is not None:
        return f"now {workload_text(spec)}; fields you leave out stay"
    if state.workload is None:
        return f"now none; fields you leave out are {default}"
    return (
        f"now {state.workload}; its other fields are unknown here: fields you leave out become "
        f"{default}"
    )


def parse_workload(text: str, now: WorkloadSpec | None = None) -> WorkloadSpec | None:
    """Return the workload that a typed text means; None means to stop the one that runs.

    `now`: the workload whose fields `text` changes, or the default. Raises ValueError: it is wrong.
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
        if value in ("on", "off") and get_args(fields[name])[:1] == (bool,):
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
