"""`EventSteps`: in which steps of a file something happened to a request, a few bytes for each."""

from array import array
from bisect import bisect_left, bisect_right

from stepscope.recordings.events import EventKind, SessionEvent
from stepscope.recordings.session import request_name

_TEXTS: dict[str, str] = {
    "preempt": "preempt {}",
    "abort": "{} aborted",
    "reject": "{} rejected",
}


class EventSteps:
    """Events of one kind, the first one of each step. One writer, any number of readers."""

    def __init__(self, kind: EventKind) -> None:
        self._kind = kind
        self._steps = array("q")
        self._times_ns = array("q")
        self._request_ids = array("q")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, time_ns: int, request_id: int) -> None:
        """The next one in order of the file."""
        if self._steps and step <= self._steps[-1]:
            return  # the same step, or one of a publisher that repeats steps
        # The steps come last: who finds one finds the rest.
        self._times_ns.append(time_ns)
        self._request_ids.append(request_id)
        self._steps.append(step)

    def next(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest one after (direction 1) or before (-1) `step`."""
        steps = self._steps
        at = bisect_right(steps, step) if direction > 0 else bisect_left(steps, step) - 1
        return self._event(at) if 0 <= at < len(steps) else None

    def spread(self, most: int) -> list[SessionEvent]:
        """All of them; where there are more than that, one of each of `most` equal stretches."""
        steps, number = self._steps, len(self._steps)
        if number <= most:
            return [self._event(at) for at in range(number)]
        first, extent = steps[0], steps[-1] - steps[0] + 1
        places = {bisect_left(steps, first + extent * each // most) for each in range(most)}
        return [self._event(at) for at in sorted(places) if at < number]

    def _event(self, at: int) -> SessionEvent:
        request_id = self._request_ids[at]
        text = _TEXTS[self._kind].format(request_name(request_id))
        return SessionEvent(self._steps[at], self._times_ns[at], self._kind, text, request_id)
