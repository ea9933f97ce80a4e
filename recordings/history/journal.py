"""`Journal`: a history that remembers no steps: who the engine is, and what was missed.

For a recorder, whose memory is its file. It takes a tenth of the time of a `History`.
"""

from stepscope.engine.protocol.wire import EngineInfo, Snapshot, Telemetry
from stepscope.recordings.history.history import History

MAX_BYTES = 1024 * 1024


class Journal(History):
    """Counts, gaps, the engine and its state are those of a `History`; all else is unknown."""

    def __init__(self) -> None:
        super().__init__(max_bytes=MAX_BYTES)

    def snapshot(self) -> Snapshot | None:
        """None: what the requests and blocks are like is not known."""
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
