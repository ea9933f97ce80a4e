"""`StepFeed`: a journal that hands steps and changes to another thread."""

from collections import deque

from stepscope.engine.protocol.wire import Audited, KnobsChanged, StepRecord, Telemetry
from stepscope.recordings.history.journal import Journal

_MAX_WAITING = 20_000  # beyond that, the oldest are dropped


class StepFeed(Journal):
    """A queue that the source's thread fills and one other thread empties."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[StepRecord | KnobsChanged | Audited] = deque(maxlen=_MAX_WAITING)

    def take_new(self) -> list[StepRecord | KnobsChanged | Audited]:
        """Return the messages since the last call."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        super()._take(sequence, message, payload)
        if isinstance(message, StepRecord | KnobsChanged | Audited):
            self._waiting.append(message)
