"""`StepFeed`: a journal that hands steps, statuses and knob changes to another thread."""

from collections import deque
from typing import TypeAlias

from stepscope.engine.protocol.wire import (
    Audited,
    EngineStatus,
    KnobsChanged,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.history.journal import Journal

_Taken: TypeAlias = StepRecord | EngineStatus | KnobsChanged | Audited
_MAX_WAITING = 20_000  # beyond that, the oldest are dropped


class StepFeed(Journal):
    """A queue of steps, statuses, knob changes and audit messages.

    The source's thread fills it, and one other thread empties it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[_Taken] = deque(maxlen=_MAX_WAITING)

    def take_new(self) -> list[_Taken]:
        """Return the messages that came since the last call.

        Of very many, the oldest are dropped.
        """
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        super()._take(sequence, message, payload)
        if isinstance(message, StepRecord | EngineStatus | KnobsChanged | Audited):
            self._waiting.append(message)
