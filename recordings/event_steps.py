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
        if not 0 <= at < len(steps):
            return None
        request_id = self._request_ids[at]
        text = _TEXTS[self._kind].format(request_name(request_id))
        return SessionEvent(steps[at], self._times_ns[at], self._kind, text, request_id)
