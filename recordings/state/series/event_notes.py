"""`EventNotes`: writes lines into the event log of a session."""

from stepscope.engine.protocol.wire import (
    Audited,
    EngineStatus,
    KnobsChanged,
    StepInFlight,
    StepRecord,
)
from stepscope.recordings.state.in_flight import in_flight_text
from stepscope.recordings.state.series.events import (
    EventLog,
    Gap,
    SessionEvent,
    audit_event,
    knobs_event,
    request_event,
)
from stepscope.recordings.state.session import SessionState


class EventNotes:
    """Writes the event log of one timeline (the data kept of one engine)."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def requests(self, message: StepRecord | EngineStatus, state: SessionState, step: int) -> None:
        """Log the request events in a message, such as arrivals and preemptions.

        Args:
            state: the state right after `message`.
            step: the step in or after which they happened.
        """
        time_ns = message.tokens_ns if isinstance(message, StepRecord) else message.time_ns
        for event in message.events:
            line = request_event(event, state, step, time_ns)
            if line is not None:
                self._log.add(line)

    def audited(self, entry: Audited, step: int) -> None:
        line = audit_event(entry, step)
        if line is not None:
            self._log.add(line)

    def knobs(self, change: KnobsChanged) -> bool:
        """Log a change of knobs. Returns whether any value changed."""
        line = knobs_event(change)
        if line is not None:
            self._log.add(line)
        return line is not None

    def gap(self, gap: Gap, time_ns: int) -> None:
        text = f"{gap.num_messages:,} messages lost after step {gap.after_step:,}"
        self._log.add(SessionEvent(max(gap.after_step, 0), time_ns, "gap", text))

    def in_flight(self, message: StepInFlight, before: StepInFlight | None, step: int) -> None:
        """Log that a step in flight takes long, once per step.

        Args:
            before: the previous message about a step in flight.
            step: the last step that has ended.
        """
        if before is None or before.step != message.step:
            self._log.add(SessionEvent(step, message.time_ns, "engine", in_flight_text(message)))

    def pause(self, step: int, since_ns: int) -> None:
        self._log.add(SessionEvent(step, since_ns, "engine", "the engine was paused"))

    def end_of_pause(self, step: int, since_ns: int, now_ns: int) -> None:
        text = f"the engine goes on after {(now_ns - since_ns) / 1e9:.1f} s of pause"
        self._log.add(SessionEvent(step, now_ns, "engine", text))
