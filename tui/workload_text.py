"""An engine's own workload as an operator types it: `rate=2 document_share=0.3`, or `off`."""

from typing import Any

import msgspec

from stepscope.engine.commands import WorkloadSpec
from stepscope.engine.field_errors import in_words

OFF = "off"
EXAMPLE = "rate=2 document_share=0.1 output_tokens=64"


def parse_workload(text: str) -> WorkloadSpec | None:
    """The workload that `text` means; None stops the one that runs.

    Raises:
        ValueError: it means none; the message says what would.
    """
    words = text.split()
    if words == [OFF]:
        return None
    fields = [field.name for field in msgspec.structs.fields(WorkloadSpec)]
    values: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in fields:
            raise ValueError(f"{word!r}: off or {EXAMPLE}; there are {', '.join(fields)}")
        values[name] = value
    if not values:
        raise ValueError(f"write off, or {EXAMPLE}")
    try:
        return msgspec.convert(values, WorkloadSpec, strict=False)
    except msgspec.ValidationError as error:
        wrong = in_words(error)
        expected = wrong.message.partition(", got ")[0]
        given = values.get(wrong.field or "")
        raise ValueError(f"{wrong.field}: {expected}, got {given!r}") from error
