"""`RequestCounts`: counts the requests of a recording, and those with late tokens."""

from collections.abc import Iterable
from typing import NamedTuple

from stepscope.engine.protocol.wire import Arrived, EngineStatus, Snapshot, StepRecord, Telemetry
from stepscope.recordings.attribution.causes import Late


class Affected(NamedTuple):
    """How many requests there were, and how many had late tokens.

    Waits that are late only because an operator had paused the engine do not count.
    """

    num_requests: int  # all that were live at some time in the recording
    num_late: int  # with a late token
    num_only_first: int  # of the late ones: only the first token was late


class RequestCounts:
    """Counts the requests of a recording. Feed it the messages in order."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self._ended: set[int] = set()  # seen as finished in a snapshot; may predate the recording

    def take(self, message: Telemetry) -> None:
        if isinstance(message, Snapshot):
            for view in message.requests:
                (self._ended if view.status == "finished" else self._alive).add(view.request_id)
        elif isinstance(message, StepRecord | EngineStatus):
            ids = [event.request_id for event in message.events if isinstance(event, Arrived)]
            self._alive.update(ids)
            if isinstance(message, StepRecord):
                self._alive.update([row.request_id for row in message.batch or ()])

    @property
    def ids(self) -> set[int]:
        """Ids of all requests seen, including those that ended before the recording began."""
        return self._alive | self._ended

    def affected(self, late: Iterable[Late]) -> Affected:
        """Count the requests with late tokens.

        Args:
            late: all late tokens of the recording.
        """
        counted = [each for each in late if not each.is_excused]
        all_late = {each.request_id for each in counted}
        between = {each.request_id for each in counted if each.token_idx}
        return Affected(len(self._alive), len(all_late), len(all_late - between))
