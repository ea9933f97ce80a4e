"""`Journal`: a history without steps, which only tracks the engine and lost messages.

It is for recorders, which keep the steps in their file. It takes a tenth of the time of a
`History`.
"""

from stepscope.engine.protocol.wire import EngineInfo, Snapshot, Telemetry
from stepscope.recordings.history.history import History

MAX_BYTES = 1024 * 1024


class Journal(History):
    """A `History` that knows only counts, gaps, engine and status. All else is unknown."""

    def __init__(self) -> None:
        super().__init__(max_bytes=MAX_BYTES)

    def snapshot(self) -> Snapshot | None:
        """Always None, because requests and blocks are unknown."""
        return None

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        if self.info is None or isinstance(message, EngineInfo | Snapshot):
            super()._take(sequence, message, payload)
        else:
            self._timeline.pass_over(sequence, message)

    def _detached(self) -> "Journal":
        other = Journal()
        other.version = self.version
        other._begin(self._timeline)
        return other
