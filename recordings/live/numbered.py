"""`Numbered`: numbers the messages of a source that makes them itself, and passes them on."""

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Snapshot, Telemetry
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap


class Numbered:
    """Fills a history and a tap, from one thread."""

    def __init__(self, history: History, tap: FrameTap) -> None:
        self._history = history
        self._tap = tap
        self._sequence = -1

    def begin(self, info: EngineInfo) -> None:
        """A new engine: of the first one a snapshot, of another one that it replaced it."""
        if self._sequence >= 0:
            self.publish(info)
            return
        self._sequence += 1
        snapshot = Snapshot(
            sequence=self._sequence,
            step=-1,
            time_ns=info.monotonic_ns,
            info=info,
            knobs={},
            knobs_version=0,
            state="running",
            requests=[],
            blocks=None,
            kv=None,
        )
        self._history.reset(snapshot)
        self._tap.send(wire.TOPICS[Snapshot], self._sequence, wire.encode(snapshot))

    def lose(self, number: int) -> None:
        """So many messages never came; the history shows a gap there."""
        self._sequence += number

    def publish(self, message: Telemetry) -> None:
        self._sequence += 1
        payload = wire.encode(message)
        self._history.append(self._sequence, message, payload)
        self._tap.send(message.topic, self._sequence, payload)
