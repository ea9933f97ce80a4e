"""A session in which an operator paused the engine for a second."""

import msgspec

from stepscope.engine.protocol.wire import Arrived, EngineStatus, StepRecord, Telemetry

Messages = list[tuple[int, Telemetry]]


def paused(messages: Messages, step: int = 120) -> Messages:
    """The same run with an operator's pause of a second before a step."""
    found: Messages = []
    shift_ns, number = 0, 0
    for _, message in messages:
        if isinstance(message, StepRecord) and message.step == step:
            begin_ns = message.schedule_start_ns
            found.append((number, EngineStatus(
                time_ns=begin_ns, state="paused", step=step - 1, num_running=1, num_waiting=0
            )))  # fmt: skip
            number, shift_ns = number + 1, 1_000_000_000
        if shift_ns and isinstance(message, StepRecord):
            times = ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns")
            moved = {name: getattr(message, name) for name in times}
            moved = {name: None if ns is None else ns + shift_ns for name, ns in moved.items()}
            events = [
                msgspec.structs.replace(event, time_ns=event.time_ns + shift_ns)
                if isinstance(event, Arrived)
                else event
                for event in message.events
            ]
            message = msgspec.structs.replace(message, events=events, **moved)
        found.append((number, message))
        number += 1
    return found
