"""Texts that describe a step in flight: one that takes long and has not ended yet."""

from stepscope.engine.protocol.wire import StepInFlight
from stepscope.recordings.state.session import request_name

_NAMED = 2  # most requests that are named


def in_flight_text(message: StepInFlight) -> str:
    """A line such as `step 1,234 in flight 7.3 s: 8,192 prefill of r17 beside 63 decodes`."""
    return f"step {message.step:,} in flight {seconds_of(message):.1f} s: {work_text(message)}"


def seconds_of(message: StepInFlight) -> float:
    """Seconds from the start of the step until this message was sent."""
    return (message.time_ns - message.since_ns) / 1e9


def work_text(message: StepInFlight) -> str:
    """What the step computes, such as `8,192 prefill of r17 beside 63 decodes`."""
    decodes = f"{message.num_decodes:,} decode" + ("" if message.num_decodes == 1 else "s")
    if not message.num_prefill_tokens:
        return decodes
    named = [request_name(part.request_id) for part in message.prefills[:_NAMED]]
    num_others = len(message.prefills) - len(named)
    whose = " and ".join(named) if not num_others else f"{', '.join(named)} and others"
    text = f"{message.num_prefill_tokens:,} prefill of {whose}"
    return f"{text} beside {decodes}" if message.num_decodes else text
