"""`Received`: a live source whose messages the test passes in one by one."""

from stepscope.engine.protocol.wire import TOPICS, Telemetry, encode
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, SourceStatus
from stepscope.recordings.state.series.latency import SLO


class Received:
    """A source of messages; implements `Source`."""

    is_live = True
    name = "engine"
    status: SourceStatus = "live"
    error = None

    def __init__(self, slo: SLO | None) -> None:
        self.history = History() if slo is None else History(slo)
        self.tap = FrameTap()

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def take(self, sequence: int, message: Telemetry) -> None:
        payload = encode(message)
        self.history.append(sequence, payload)
        self.tap.send(TOPICS[type(message)], sequence, payload)
