"""Sets of knobs to simulate, as the user typed them."""

from collections.abc import Iterator
from typing import TypeAlias

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

Variant: TypeAlias = tuple[str, dict[str, KnobValue]]
"""A text for people, and the values of the knobs that differ."""

_MAX_SWEEP = 8


def changes_in(text: str) -> dict[str, KnobValue]:
    """Return the knobs of `KNOB=VALUE`, or of several with commas between them.

    Raises:
        WrongUsage: there is no such knob, or the value is not valid.
    """
    flags = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in Knobs.__struct_fields__:
            known = ", ".join(Knobs.__struct_fields__)
            raise WrongUsage(f"{part!r}: expected KNOB=VALUE; the knobs are {known}")
        flags[name] = value
    changes: dict[str, KnobValue] = convert_flags(Knobs, flags)
    return changes


def swept(text: str) -> Iterator[Variant]:
    """Yield a variant for each value of `KNOB=FIRST..LAST`: about each doubling, at most eight.

    Raises:
        WrongUsage: the text is not valid.
    """
    name, _, bounds = text.partition("=")
    first, dots, last = bounds.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and 0 < int(first) < int(last)):
        raise WrongUsage(f"--sweep: expected KNOB=FIRST..LAST, whole numbers, got {text!r}")
    low, high = int(first), int(last)
    num_points = min(_MAX_SWEEP, (high // low).bit_length() if high >= 2 * low else 2)
    num_points = max(num_points, 2)
    values = {round(low * (high / low) ** (at / (num_points - 1))) for at in range(num_points)}
    for value in sorted(values):
        yield f"{name}={value}", changes_in(f"{name}={value}")
