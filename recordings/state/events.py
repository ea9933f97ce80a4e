"""Events of a session: their log lines, gaps of lost messages, and the log, ordered by step."""

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.recordings.state.audit_text import change_text, value_text, who_text
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState, request_name

MAX_EVENTS = 20_000

EventKind: TypeAlias = Literal[
    "preempt", "finish", "abort", "reject", "knobs", "slo", "gap", "mark", "engine"
]


class SessionEvent(NamedTuple):
    """One line of the event log, and the step that a screen shows when the line is chosen."""

    step: int  # it happened in or after this step; for knobs, the first step with new values
    time_ns: int  # of the engine
    kind: EventKind
    text: str
    request_id: int | None = None


_step = attrgetter("step")


class AuditedStep(NamedTuple):
    """An audit entry of a command other than `SetKnobs`, which was done or refused."""

    step: int  # from which the command takes effect; if it was refused, the step at that time
    entry: wire.Audited


class Gap(NamedTuple):
    """A span of messages that were lost and cannot be requested again."""

    first_sequence: int
    last_sequence: int
    after_step: int  # the last step received before the gap; -1 if there was none
    before_step: int | None  # the first step after the gap; None until one is received

    @property
    def num_messages(self) -> int:
        return self.last_sequence - self.first_sequence + 1


class EventLog:
    """Events in order of steps, at least the newest `most`. Only one thread may write.

    Late tokens are not logged here. They are looked up on demand, see `Windows.late_events`.
    """

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._events: list[SessionEvent] = []
        self._most = most

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: SessionEvent | None) -> None:
        if event is None:
            return
        events = self._events
        # A mark may be set at an earlier step, and a knob change may name a later one.
        insort(events, event, key=_step)
        if len(events) > self._most + self._most // 8:
            del events[: len(events) - self._most]

    def until(self, step: int, limit: int, kinds: frozenset[str] | None) -> list[SessionEvent]:
        """The last `limit` events up to `step`, oldest first.

        Of consecutive events of kind "engine" with equal text, only the last is returned. An
        operator who runs single steps causes many of them.
        """
        found: list[SessionEvent] = []
        for event in self._until(step):
            if len(found) == limit:
                break
            if kinds is not None and event.kind not in kinds:
                continue
            if event.kind == "engine" and found and found[-1].text == event.text:
                continue
            found.append(event)
        found.reverse()
        return found

    def _until(self, step: int) -> Iterator[SessionEvent]:
        """Yield the events up to a step, the newest first."""
        for index in range(bisect_right(self._events, step, key=_step) - 1, -1, -1):
            yield self._events[index]

    def next(self, step: int, direction: int, kinds: frozenset[str] | None) -> SessionEvent | None:
        """The nearest event in a later step (direction 1) or an earlier one (-1)."""
        later = range(bisect_right(self._events, step, key=_step), len(self._events))
        near = (self._events[at] for at in later) if direction > 0 else self._until(step - 1)
        return next((each for each in near if kinds is None or each.kind in kinds), None)

    def spread(self, most: int = sys.maxsize) -> list[SessionEvent]:
        """All events; if more than `most`, one from each of `most` equal ranges of steps."""
        events, number = self._events, len(self._events)
        if number <= most:
            return events[:]
        first, extent = events[0].step, events[-1].step - events[0].step + 1
        bounds = [first + extent * each // most for each in range(most)]
        places = {bisect_left(events, bound, key=_step) for bound in bounds}
        return [events[place] for place in sorted(places) if place < number]

    def end_of(self, request_id: int, step: int) -> SessionEvent | None:
        """The finish or abort event of a request; None if the request did not end by `step`."""
        ends = (each for each in self._until(step) if each.kind in ("finish", "abort"))
        return next((each for each in ends if each.request_id == request_id), None)

    def forget_before(self, step: int) -> None:
        del self._events[: bisect_left(self._events, step, key=_step)]

    def forget_after(self, step: int) -> None:
        """Remove the events after a step, except marks, which are notes by a person."""
        num_kept = bisect_right(self._events, step, key=_step)
        self._events[num_kept:] = [e for e in self._events[num_kept:] if e.kind == "mark"]


def request_event(
    event: wire.RequestEvent, state: SessionState, step: int, time_ns: int
) -> SessionEvent | None:
    """The log line for a request event; None if the event is not logged."""
    name = request_name(event.request_id)
    kind: EventKind = "finish"
    match event:
        case wire.Preempted():
            kind = "preempt"
            text = f"preempt {name} ({event.reason}, {event.num_blocks} blocks freed)"
        case wire.Finished():
            text = f"{name} done ({event.reason}), {event.num_output_tokens} tok"
            view = state.requests.get(event.request_id)
            if event.handed_to is not None:
                text = f"{name} handed over to {event.handed_to}"
            elif view is not None and not view.is_partial and view.finish_ns is not None:
                text += f" in {(view.finish_ns - view.arrival_ns) / 1e9:.1f} s"
        case wire.Aborted():
            kind, text = "abort", f"{name} aborted: {event.reason}"
        case wire.Rejected():
            text = f"rejected {event.client_id or name}: {event.reason}"
            return SessionEvent(step, time_ns, "reject", text)
        case _:
            return None
    return SessionEvent(step, time_ns, kind, text, event.request_id)


def mark_event(mark: wire.Mark) -> SessionEvent:
    return SessionEvent(mark.step, mark.time_ns, "mark", f"{mark.text} ({mark.who})")


def audit_event(entry: wire.Audited, step: int) -> SessionEvent | None:
    """The log line for an audit entry; None for a change of knobs, which has its own line.

    `step`: the newest step, used for commands that took no effect.
    """
    if entry.command == "SetKnobs" and not entry.code:
        return None
    if entry.effective_step is not None:
        step = entry.effective_step
    text = f"{who_text(entry)}: {change_text(entry)}"
    return SessionEvent(step, entry.time_ns, "engine", text)


def knobs_event(change: wire.KnobsChanged) -> SessionEvent | None:
    """The log line for a change of knobs; None if no value changed, as at the start."""
    changed = changed_knobs(change)
    if not changed:
        return None
    text = f"{changed} by {change.who}, from step {change.effective_step:,}"
    return SessionEvent(change.effective_step, change.time_ns, "knobs", text)


def changed_knobs(change: wire.KnobsChanged) -> str:
    """Old and new values of the changed knobs; empty if none changed."""
    return ", ".join(
        f"{name} {value_text(change.old[name])}→{value_text(value)}"
        for name, value in change.new.items()
        if name in change.old and change.old[name] != value
    )


def gap_event(num_messages: int, after_step: int, time_ns: int) -> SessionEvent:
    text = f"{num_messages:,} messages lost after step {after_step:,}"
    return SessionEvent(max(after_step, 0), time_ns, "gap", text)


def breach_event(
    slo: SLO, step: int, time_ns: int, kind: str, value_ns: int, request_id: int | None
) -> SessionEvent:
    bound_ms = slo.itl_ms if kind == "ITL" else slo.ttft_ms
    who = "" if request_id is None else f" ({request_name(request_id)})"
    value = f"{value_ns / 1e6:.0f}"
    if value == f"{bound_ms:g}":
        value = f"{value_ns / 1e6:.1f}"  # "50 ms > 50 ms" looks wrong
    text = f"{kind} {value} ms > {bound_ms:g} ms{who}"
    return SessionEvent(step, time_ns, "slo", text, request_id)


class Gaps:
    """The gaps among the steps in memory. Only one thread may write."""

    def __init__(self) -> None:
        self.found: list[Gap] = []  # the gaps, oldest first
        # Whether messages are missing and no snapshot has corrected the state since.
        self.needs_snapshot = False
        self._num_lost_before = 0  # messages lost in forgotten gaps

    @property
    def steps(self) -> set[int | None]:
        """For each gap, the first step after it."""
        return {gap.before_step for gap in self.found}

    @property
    def num_lost(self) -> int:
        """Number of messages lost for good, including those before the oldest step in memory."""
        return self._num_lost_before + sum(gap.num_messages for gap in self.found)

    def note(self, first_sequence: int, last_sequence: int, step: int) -> None:
        """Add a gap: messages were lost after the record of `step`."""
        self.found.append(Gap(first_sequence, last_sequence, step, None))
        self.needs_snapshot = True

    def end(self, step: int) -> None:
        """Store `step` as the first step after the newest gaps, unless they have one already."""
        for index in range(len(self.found) - 1, -1, -1):
            if self.found[index].before_step is not None:
                break
            self.found[index] = self.found[index]._replace(before_step=step)

    def forget_before(self, step: int) -> None:
        """Forget gaps before a step, but keep counting the messages lost in them."""
        kept = [gap for gap in self.found if gap.before_step is None or gap.before_step >= step]
        self._num_lost_before = self.num_lost - sum(gap.num_messages for gap in kept)
        self.found = kept

    def forget_after(self, step: int) -> None:
        self.found = [
            gap for gap in self.found if gap.before_step is not None and gap.before_step <= step
        ]
