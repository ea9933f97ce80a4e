"""`Received`: a live source whose messages the test passes in. `every_message` of an engine."""

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import ReplayFrom
from stepscope.engine.protocol.replies import Replayed
from stepscope.engine.protocol.wire import TOPICS, Telemetry, TelemetryMessage, decode, encode
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


def every_message(client: ControlClient, since: int = 0) -> list[TelemetryMessage]:
    """All messages from number `since` on that the engine still keeps."""
    messages: list[TelemetryMessage] = []
    while True:
        replayed = client.ask(ReplayFrom(sequence=since))
        assert isinstance(replayed, Replayed)
        if not replayed.frames:
            return messages
        messages += [decode(frame.payload) for frame in replayed.frames]
        since = replayed.frames[-1].sequence + 1
