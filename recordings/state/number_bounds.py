"""Bounds of the counts and times in a telemetry message."""

import msgspec

from stepscope.engine.protocol.wire import (
    EngineStatus,
    Snapshot,
    StepInFlight,
    StepRecord,
    Telemetry,
)

MAX_NUMBER = 2**62


def check_numbers(sequence: int, message: Telemetry) -> None:
    """Raise msgspec.ValidationError if a number is outside the bounds."""
    if isinstance(message, StepRecord):
        start_ns, end_ns = message.schedule_start_ns, message.tokens_ns
        lowest = min(sequence, message.step, start_ns, end_ns)
        if lowest >= 0 and max(sequence, message.step, start_ns, end_ns) < MAX_NUMBER:
            return  # nearly always
        numbers = {
            "sequence": sequence,
            "step": message.step,
            "schedule_start_ns": start_ns,
            "tokens_ns": end_ns,
        }
    elif isinstance(message, Snapshot | EngineStatus):
        numbers = {"step": message.step + 1, "time_ns": message.time_ns}
    elif isinstance(message, StepInFlight):
        numbers = {"step": message.step, "since_ns": message.since_ns, "time_ns": message.time_ns}
    else:
        return
    for name, number in numbers.items():
        if not 0 <= number < MAX_NUMBER:
            raise msgspec.ValidationError(f"{number} is out of range - at `$.{name}`")
