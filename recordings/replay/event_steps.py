"""`EventSteps`: the steps of a file with a certain request event."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TypeAlias

from stepscope.engine.protocol.wire import Aborted, Preempted, Rejected
from stepscope.recordings.state.series.events import SessionEvent, request_event
from stepscope.recordings.state.session import SessionState

Noted: TypeAlias = Preempted | Aborted | Rejected

_NO_STATE = SessionState()  # the texts of these events need no state


class EventSteps:
    """Request events of one kind, such as preemptions; only the first in each step is stored.

    One thread writes, any number read.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._times_ns = array("q")
        self._events: list[Noted] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, time_ns: int, event: Noted) -> None:
        """Add the next event in file order."""
        if self._steps and step <= self._steps[-1]:
            return  # the same step, or a repeated one
        # Steps are added last: a reader that finds a step finds the rest.
        self._times_ns.append(time_ns)
        self._events.append(event)
        self._steps.append(step)

    def next(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest event in a later step (direction 1) or an earlier one (-1)."""
        steps = self._steps
        at = bisect_right(steps, step) if direction > 0 else bisect_left(steps, step) - 1
        return self._event(at) if 0 <= at < len(steps) else None

    def spread(self, most: int) -> list[SessionEvent]:
        """All events; if more than `most`, one from each of `most` equal ranges of steps."""
        steps, number = self._steps, len(self._steps)
        if number <= most:
            return self._told(range(number))
        first, extent = steps[0], steps[-1] - steps[0] + 1
        places = {bisect_left(steps, first + extent * each // most) for each in range(most)}
        return self._told(at for at in sorted(places) if at < number)

    def _told(self, places: Iterable[int]) -> list[SessionEvent]:
        return [event for at in places if (event := self._event(at)) is not None]

    def _event(self, at: int) -> SessionEvent | None:
        """The event as a line of the event log, with the same text as in a history."""
        return request_event(self._events[at], _NO_STATE, self._steps[at], self._times_ns[at])
